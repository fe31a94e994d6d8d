"""A survey of a fleet: its trees, its pins, and the prefixes that all of it uses most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from sgl_importance.cli.fleet import (
    Member,
    Prefix,
    ask_all,
    hot_prefixes_of,
    hottest,
    members_of,
    pins_of,
    summary_of,
    together,
)
from sgl_importance.cli.server_client import Server, ServerError

Counting = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""Shows how many of so many steps are done: as ``terminal.counted``."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What several servers answered.

    Attributes:
        members: trees of those that answered.
        hottest: prefixes that they use most, each with its row.
        pins: by server, its answer to ``GET /kv_importance/pins``; empty where nobody asked for them.
        unreached: by address, what is wrong with a server that did not answer.
    """

    members: list[Member]
    hottest: list[tuple[Prefix, dict[str, Any]]]
    pins: dict[str, dict[str, Any]]
    unreached: dict[str, ServerError]

    def document(self) -> dict[str, Any]:
        """The members and their sums, as JSON."""
        summaries = [summary_of(member) for member in self.members]
        return {"members": summaries, "together": together(summaries)}


def survey(servers: Sequence[Server], hot: int, counting: Counting, *, with_pins: bool = False) -> Survey:
    """Asks all of them at the same time; one that did not answer is asked no second question.

    Args:
        servers: to ask.
        hot: prefixes to look for.
        counting: shows the progress.
        with_pins: whether they are asked for.
    """
    with counting("Asking the servers", len(servers)) as advance:
        found = ask_all(servers, members_of, advance)
        answers = list(zip(servers, found, strict=True))
        members = [member for each in found if not isinstance(each, ServerError) for member in each]
        pins: dict[str, dict[str, Any]] = {}
        if with_pins:
            asked = [server for server, each in answers if not isinstance(each, ServerError)]
            for server, said in zip(asked, ask_all(asked, pins_of, _nothing), strict=True):
                if not isinstance(said, ServerError):
                    pins[server.url] = said
    with counting("Looking for the hottest prefixes", 2 * len(members)) as advance:
        lists = ask_all(members, lambda member: hot_prefixes_of(member, hot), advance)
        prefixes: list[Prefix] = []
        listed: list[Member] = []
        for member, each in zip(members, lists, strict=True):
            if not isinstance(each, ServerError):
                prefixes += each
                listed.append(member)
        rows = hottest(prefixes, listed, hot, advance)
    unreached = {server.url: each for server, each in answers if isinstance(each, ServerError)}
    return Survey(members, rows, pins, unreached)


def _nothing() -> None:
    pass

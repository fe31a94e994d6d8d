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
    ask_servers,
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
        found, unreached = ask_servers(servers, members_of, advance)
        members = [member for each in found.values() for member in each]
        pins: dict[str, dict[str, Any]] = {}
        if with_pins:
            pins, _ = ask_servers([server for server in servers if server.url in found], pins_of)
    with counting("Looking for the hottest prefixes", 2 * len(members)) as advance:
        lists = ask_all(members, lambda member: hot_prefixes_of(member, hot), advance)
        prefixes: list[Prefix] = []
        listed: list[Member] = []
        for member, each in zip(members, lists, strict=True):
            if not isinstance(each, ServerError):
                prefixes += each
                listed.append(member)
        rows = hottest(prefixes, listed, hot, advance)
    return Survey(members, rows, pins, unreached)

"""What the page of a fleet asks: all servers as one document, and pins for all of them."""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from typing import Any, TypeVar

from sgl_importance.client.fleet import (
    FLEET_SECONDS,
    Prefix,
    ask_all,
    hot_prefixes_of,
    hottest,
    members_of,
    pins_of,
    pins_together,
    summary_of,
    together,
)
from sgl_importance.client.server_client import KeyRefused, Server, ServerError

HOT = 10
REMEMBERED = 200
"""Prefixes that a page may have shown and somebody may pin."""

T = TypeVar("T")


class FleetView:
    """Several servers, asked under the key of whoever looks.

    Args:
        urls: addresses of the servers.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = list(dict.fromkeys(url.rstrip("/") for url in urls))
        self._shown: OrderedDict[str, Prefix] = OrderedDict()
        self._lock = threading.Lock()

    def show(self, key: str | None) -> dict[str, Any]:
        """Members, their sums, hottest prefixes, pins, and what is wrong with servers that did not answer.

        Raises:
            KeyRefused: nobody answered, and somebody wants another key.
        """
        with self._servers(key) as servers:
            found, unreached = _split(servers, ask_all(servers, members_of, _nothing))
            if not found and (refusal := next(_refusals(unreached), None)) is not None:
                raise refusal
            members = [member for each in found.values() for member in each]
            lists = ask_all(members, lambda member: hot_prefixes_of(member, HOT), _nothing)
            prefixes = [prefix for each in lists if not isinstance(each, ServerError) for prefix in each]
            rows = [
                {"id": self._remember(prefix), **row}
                for prefix, row in hottest(prefixes, members, HOT, _nothing)
            ]
            pins, _ = _split(servers, ask_all(servers, pins_of, _nothing))
        summaries = [
            {**summary_of(member), "url": member.server.url, "dp_rank": member.dp_rank} for member in members
        ]
        return {
            "servers": self.urls,
            "members": summaries,
            "together": together(summaries),
            "hottest": rows,
            "pins": pins_together(pins.items()),
            "unreached": {url: str(error) for url, error in unreached.items()},
        }

    def pin(self, key: str | None, prefix_id: str, ttl_seconds: float | None) -> dict[str, Any]:
        """Pins a prefix that was shown, under one name.

        Raises:
            ServerError: nobody did it.
            KeyError: none of that name was shown lately.
        """
        with self._lock:
            prefix = self._shown[prefix_id]
        body = {**prefix.body, "ttl_seconds": ttl_seconds, "pin_id": uuid.uuid4().hex}
        return self._everywhere(key, lambda server: server.post("/pin", body))

    def unpin(self, key: str | None, pin_id: str) -> dict[str, Any]:
        """Ends a pin.

        Raises:
            ServerError: nobody did it.
        """
        return self._everywhere(key, lambda server: server.post("/unpin", {"pin_id": pin_id}))

    def _everywhere(self, key: str | None, question: Callable[[Server], dict[str, Any]]) -> dict[str, Any]:
        with self._servers(key) as servers:
            answers, unreached = _split(servers, ask_all(servers, question, _nothing))
        if not answers:
            raise next(_refusals(unreached), next(iter(unreached.values())))
        return {"servers": answers, "unreached": {url: str(error) for url, error in unreached.items()}}

    @contextmanager
    def _servers(self, key: str | None) -> Iterator[list[Server]]:
        with ExitStack() as opened:
            yield [opened.enter_context(Server(url, key, seconds=FLEET_SECONDS)) for url in self.urls]

    def _remember(self, prefix: Prefix) -> str:
        name = blake2b(repr(prefix.key).encode(), digest_size=8).hexdigest()
        with self._lock:
            self._shown[name] = prefix
            self._shown.move_to_end(name)
            while len(self._shown) > REMEMBERED:
                self._shown.popitem(last=False)
        return name


def _nothing() -> None:
    pass


def _split(
    servers: Sequence[Server], found: Sequence[T | ServerError]
) -> tuple[dict[str, T], dict[str, ServerError]]:
    """Answers, and what went wrong, by address."""
    pairs = [(server.url, each) for server, each in zip(servers, found, strict=True)]
    return (
        {url: each for url, each in pairs if not isinstance(each, ServerError)},
        {url: each for url, each in pairs if isinstance(each, ServerError)},
    )


def _refusals(unreached: dict[str, ServerError]) -> Iterator[KeyRefused]:
    return (error for error in unreached.values() if isinstance(error, KeyRefused))

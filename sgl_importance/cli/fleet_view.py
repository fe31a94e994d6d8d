"""What the page of a fleet asks: all servers as one document, and pins for all of them."""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from hashlib import blake2b
from typing import Any, TypeVar

import httpx

from sgl_importance.cli.fleet import (
    FLEET_CURE,
    FLEET_SECONDS,
    Prefix,
    ask_servers,
    pins_together,
)
from sgl_importance.cli.server_client import KeyRefused, Server, ServerError
from sgl_importance.cli.survey import survey

HOT = 10
PAGE_SECONDS = 6.0
"""Longest wait for one answer that the page shows."""
ROUND_SECONDS = 18.0
"""After which nothing more is asked: after 30 s the page gives up and shows no server at all. An answer
can take twice its limit, once to connect and once to read."""
REMEMBERED = 200
"""Prefixes that a page may have shown and somebody may pin."""

T = TypeVar("T")


class FleetView:
    """Several servers, asked under the key of whoever looks.

    Args:
        urls: addresses of the servers.
        transport: replaces the network, for tests.
        clock: in seconds.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.urls = list(dict.fromkeys(url.rstrip("/") for url in urls))
        self._transport = transport
        self._clock = clock
        self._shown: OrderedDict[str, Prefix] = OrderedDict()
        self._lock = threading.Lock()

    def show(self, key: str | None) -> dict[str, Any]:
        """Members, their sums, hottest prefixes, pins, and what is wrong with servers that did not answer.

        Raises:
            KeyRefused: nobody answered, and somebody wants another key.
        """
        end = self._clock() + ROUND_SECONDS
        with self._servers(key, PAGE_SECONDS, lambda: end - self._clock()) as servers:
            found = survey(servers, HOT, lambda *_: nullcontext(lambda: None), with_pins=True)
        if not found.members and (refusal := next(_refusals(found.unreached), None)) is not None:
            raise refusal
        document = found.document()
        for summary, member in zip(document["members"], found.members, strict=True):
            summary |= {"url": member.server.url, "dp_rank": member.dp_rank}
        return {
            "servers": self.urls,
            **document,
            "hottest": [{"id": self._remember(prefix), **row} for prefix, row in found.hottest],
            "pins": pins_together(found.pins.items()),
            "unreached": {url: str(error) for url, error in found.unreached.items()},
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
            answers, unreached = ask_servers(servers, question)
        if not answers:
            raise next(_refusals(unreached), next(iter(unreached.values())))
        return {"servers": answers, "unreached": {url: str(error) for url, error in unreached.items()}}

    @contextmanager
    def _servers(
        self, key: str | None, seconds: float = FLEET_SECONDS, left: Callable[[], float] = lambda: math.inf
    ) -> Iterator[list[Server]]:
        with ExitStack() as opened:
            yield [
                opened.enter_context(
                    Server(url, key, seconds=seconds, left=left, cure=FLEET_CURE, transport=self._transport)
                )
                for url in self.urls
            ]

    def _remember(self, prefix: Prefix) -> str:
        name = blake2b(repr(prefix.key).encode(), digest_size=8).hexdigest()
        with self._lock:
            self._shown[name] = prefix
            self._shown.move_to_end(name)
            while len(self._shown) > REMEMBERED:
                self._shown.popitem(last=False)
        return name


def _refusals(unreached: dict[str, ServerError]) -> Iterator[KeyRefused]:
    return (error for error in unreached.values() if isinstance(error, KeyRefused))

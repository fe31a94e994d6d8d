"""The page of a fleet where servers hang: each is asked in vain once, and the others are shown in time."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import nullcontext
from typing import Any

import httpx
import pytest

from sgl_importance.cli.fleet_view import FleetView
from sgl_importance.cli.server_client import Server
from sgl_importance.cli.survey import survey

GOOD, BAD = "http://good:1", "http://bad:1"
PAGE_GIVES_UP_SECONDS = 30
PIN = {"pin_id": "p", "source": "requested", "cache_salt": None, "tokens": 64, "granted_tokens": {}}
HITS = {"requests": 1, "prompt_tokens": 100, "hit_tokens": {"device": 10}}
ANSWERS: dict[str, Any] = {
    "": {
        "policy": "importance",
        "clock": 1,
        "tiers": {"device": {"used_tokens": 1, "total_tokens": 2}},
        "hits": HITS,
        "faults": {"counts": {}, "fallback": None},
    },
    "/pins": {"pins": [PIN], "budget": {}},
    "/tree": {"nodes": [{"id": each, "accesses": 2, "tokens": 64, "label": "x"} for each in range(20)]},
    "/find": {"path": [{"id": 15}], "matched_tokens": 64},
}
NODE = {"accesses": 2, "tiers": ["device"], "extra_key": None, "cache_salt": None}


class Network(httpx.BaseTransport):
    """One server that answers, and one that hangs at some paths; the clock is the waits for it.

    Args:
        hanging: how these paths begin.
        evicted: a node that neither holds any more.
    """

    def __init__(self, *hanging: str, evicted: int | None = None) -> None:
        self.hanging, self.evicted = hanging, evicted
        self.waits = 0
        self.asked: Counter[str] = Counter()
        self.seconds = 0.0
        self._lock = threading.Lock()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/kv_importance")
        with self._lock:
            self.asked[f"{request.url.scheme}://{request.url.netloc.decode()}"] += 1
            if request.url.host == "bad" and path.startswith(self.hanging):
                timeout = request.extensions["timeout"]
                self.seconds += timeout["connect"] + timeout["read"]
                self.waits += 1
                raise httpx.ReadTimeout("", request=request)
        if path.startswith("/node"):
            number = int(path.split("/")[2])
            if number == self.evicted:
                return httpx.Response(404, json={"message": f"node {number} is not in the tree"})
            return httpx.Response(200, json=NODE | {"input_ids": [number] * 64})
        return httpx.Response(200, json=ANSWERS[path])


def show(network: Network) -> dict[str, Any]:
    return FleetView([BAD, GOOD], transport=network, clock=lambda: network.seconds).show(None)


def hottest_by_command(network: Network) -> list[dict[str, Any]]:
    """As ``fleet show`` asks, without a limit on the whole."""
    with Server(BAD, transport=network) as bad, Server(GOOD, transport=network) as good:
        found = survey([bad, good], 10, lambda *_: nullcontext(lambda: None))
    return [row for _, row in found.hottest]


@pytest.mark.parametrize("path", ["/tree", "/node/3", "/find", "/node/15"])
def test_a_server_that_hangs_on_the_way_is_waited_for_once(path: str) -> None:
    network = Network(path)
    rows = hottest_by_command(network)
    assert network.waits == 1
    assert [[each["name"] for each in row["members"]] for row in rows] == [[GOOD]] * 10


def test_a_node_that_was_evicted_meanwhile_is_passed_over() -> None:
    network = Network("nothing", evicted=3)
    rows = hottest_by_command(network)
    assert network.waits == 0
    assert len(rows) == 9
    assert all([each["name"] for each in row["members"]] == [BAD, GOOD] for row in rows)


def test_a_server_that_hangs_is_asked_once_and_hides_no_other() -> None:
    network = Network("")
    shown = show(network)
    assert network.asked[BAD] == 1
    assert list(shown["unreached"]) == [BAD]
    assert [each["url"] for each in shown["members"]] == [GOOD]
    assert [each["pin_id"] for each in shown["pins"]] == ["p"]
    assert len(shown["hottest"]) == 10
    assert network.seconds < PAGE_GIVES_UP_SECONDS


@pytest.mark.parametrize("path", ["/pins", "/tree", "/node", "/find"])
def test_a_round_ends_before_the_page_gives_up(path: str) -> None:
    network = Network(path)
    shown = show(network)
    assert network.seconds > 0
    assert network.seconds < PAGE_GIVES_UP_SECONDS
    assert [each["url"] for each in shown["members"]] == [BAD, GOOD]
    assert "p" in [each["pin_id"] for each in shown["pins"]]

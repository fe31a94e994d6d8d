"""The page of a fleet where servers hang: each is asked in vain once, and the others are shown in time."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import httpx
import pytest

from sgl_importance.client.fleet_view import FleetView

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
    "/find": {"path": [{"id": 0}], "matched_tokens": 64},
}
NODE = {"accesses": 2, "tiers": ["device"], "extra_key": None, "cache_salt": None}


class Network(httpx.BaseTransport):
    """One server that answers, and one that hangs at some paths; the clock is the waits for it."""

    def __init__(self, *hanging: str) -> None:
        self.hanging = hanging
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
                raise httpx.ReadTimeout("", request=request)
        if path.startswith("/node"):
            number = int(path.split("/")[2])
            return httpx.Response(200, json=NODE | {"input_ids": [number] * 64})
        return httpx.Response(200, json=ANSWERS[path])


def show(network: Network) -> dict[str, Any]:
    return FleetView([BAD, GOOD], transport=network, clock=lambda: network.seconds).show(None)


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

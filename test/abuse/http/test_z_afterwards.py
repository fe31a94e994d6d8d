"""After all of the abuse, therefore last: the server answers as one without a cache, and stops when told."""

from __future__ import annotations

import os
import signal

import httpx
import pytest

from support.servers import ServerProcess
from support.waiting import wait_until
from support.workloads.exchanges import Exchange, replay

pytestmark = pytest.mark.server


def test_the_server_answers_like_one_without_a_cache(server: ServerProcess, exchanges: list[Exchange]):
    assert len({exchange.answer for exchange in exchanges}) > len(exchanges) // 2, (
        "the model ignores its prompt"
    )
    first = replay(server, exchanges, concurrency=1)
    second = replay(server, exchanges, concurrency=8)
    assert first.differing == second.differing == []
    for tier in ("device", "host"):
        assert first.hit_tokens[tier] + second.hit_tokens[tier] > 0, tier


def test_the_server_is_well(server: ServerProcess, client: httpx.Client):
    assert client.get("/health_generate").status_code == 200
    # What was thrown at it was refused, not survived.
    assert server.metric("sglang:kv_importance_faults_total") == 0
    assert server.metric("sglang:kv_importance_fallback") == 0
    assert "Traceback" not in server.log()


def test_the_server_stops_when_it_is_told_to(server: ServerProcess):
    """Nothing that was asked of it keeps it waiting."""
    os.kill(server.pid, signal.SIGTERM)
    wait_until(lambda: "Remaining number of requests" in server.log())
    assert "Remaining number of requests 0." in server.log()

"""The serving benchmark end to end: one small workload, two arms, real servers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))
from benchmark.serving.arms import ARMS, OURS, STOCK
from benchmark.serving.passes import Servers, count, time_open_loop
from benchmark.serving.workloads import Workload, load_parameters, make_workload


@pytest.mark.server
def test_two_arms_serve_the_same_requests_and_count_what_they_hit() -> None:
    parameters = load_parameters()
    made = make_workload("documents", parameters)
    workload = Workload("documents", made.requests[:40])
    with Servers(parameters) as servers:
        rows = {arm: count(servers, arm, workload, device_tokens=2048) for arm in (OURS, STOCK)}
        again = count(servers, STOCK, workload, device_tokens=2048)
        server = servers.start(ARMS[STOCK], workload, device_tokens=2048, fresh=False)
        times = time_open_loop(server, workload.requests[:12], warm_up=8)
    assert again == rows[STOCK], "what came before a flush must not show"
    for row in rows.values():
        assert row["requests"] == 40
        assert row["prompt_tokens"] == sum(len(request.token_ids()) for request in workload.requests)
        assert 0 < row["device_hit_tokens"] == row["prompt_tokens"] - row["uncached_tokens"]
        assert row["evicted_tokens"] > 0
        assert row["host_hit_tokens"] == row["storage_hit_tokens"] == 0
    assert times["requests"] == 4
    assert 0 < times["ttft_p50"] <= times["ttft_p95"] <= times["ttft_p99"]
    assert times["tpot_p50"] > 0
    assert times["cpu_seconds"] > 0

"""The serving benchmark on a server of stock; under importance test/serve/test_hinted_requests.py counts."""

from __future__ import annotations

import pytest

from benchmark.serving.arms import ARMS, STOCK
from benchmark.serving.passes import Servers, count
from benchmark.serving.timing import time_in_turns, time_open_loop
from benchmark.serving.workloads import Workload, load_parameters, make_workload

POOL = 2048  # three documents and the running request


@pytest.mark.server
def test_requests_are_counted_the_same_again_and_timed() -> None:
    parameters = load_parameters()
    made = make_workload("documents", parameters)
    workload = Workload("documents", made.requests[:16])
    with Servers(parameters) as servers:
        row = count(servers, STOCK, workload, device_tokens=POOL)
        first = servers.start(ARMS[STOCK], workload, device_tokens=POOL, fresh=False)
        again = count(servers, STOCK, workload, device_tokens=POOL)
        server = servers.start(ARMS[STOCK], workload, device_tokens=POOL, fresh=False)
        times = time_open_loop(server, workload.requests[:6], warm_up=2)
        turns = time_in_turns({STOCK: server, "again": server}, workload.requests[:6], warm_up=2)
    assert server is first, "an arm that learns nothing keeps its server"
    assert again == row, "what came before a flush must not show"
    assert row["requests"] == 16
    assert row["prompt_tokens"] == sum(len(request.token_ids()) for request in workload.requests)
    assert 0 < row["device_hit_tokens"] == row["prompt_tokens"] - row["uncached_tokens"]
    assert row["evicted_tokens"] > 0
    assert row["host_hit_tokens"] == row["storage_hit_tokens"] == 0
    assert times["requests"] == 4
    assert 0 < times["ttft_p50"] <= times["ttft_p95"] <= times["ttft_p99"]
    assert times["tpot_p50"] > 0
    assert times["cpu_seconds"] > 0
    assert list(turns) == [STOCK, "again"]
    for row in turns.values():
        assert row["requests"] == 4
        assert row["prompt_tokens"] == times["prompt_tokens"]
        assert 0 < row["ttft_p50"] <= row["ttft_p99"]

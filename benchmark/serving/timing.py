"""How long requests take: in open loop on one server, or in turns on several that run side by side."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence

import psutil

from benchmark.serving.load import Answer, send_in_order, send_in_turns, send_open_loop
from benchmark.serving.passes import counts_of
from benchmark.serving.rows import Row
from benchmark.serving.workloads import at
from sgl_importance_lab.workload.workload_request import WorkloadRequest

from support.servers import ServerProcess


def time_open_loop(server: ServerProcess, requests: Sequence[WorkloadRequest], *, warm_up: int) -> Row:
    """Times of the requests behind the first ``warm_up``, which are sent one after the other."""
    send_in_order(server.base_url, server.name, requests[:warm_up])
    timed = requests[warm_up:]
    shifted = [at(request, request.seconds - timed[0].seconds) for request in timed]
    cpu, start = _cpu_seconds(server), time.perf_counter()
    answers = send_open_loop(server.base_url, server.name, shifted)
    took = time.perf_counter() - start
    return {
        **counts_of(answers),
        **_times_of(answers),
        "requests_per_second": len(answers) / took,
        "prompt_tokens_per_second": sum(answer.prompt_tokens for answer in answers) / took,
        "cpu_seconds": _cpu_seconds(server) - cpu,
    }


def time_in_turns(
    servers: Mapping[str, ServerProcess], requests: Sequence[WorkloadRequest], *, warm_up: int
) -> dict[str, Row]:
    """As ``time_open_loop``, by arm: each request goes to one server after the other, one at a time.

    What slows the machine down slows all servers alike, so the ratios say more than those of servers that
    run one after the other; nothing is in flight beside a request, so they say nothing about queues.
    """
    targets = {name: (server.base_url, server.name) for name, server in servers.items()}
    answers = send_in_turns(targets, requests)
    timed = {name: found[warm_up:] for name, found in answers.items()}
    return {name: {**counts_of(found), **_times_of(found)} for name, found in timed.items()}


def _times_of(answers: Sequence[Answer]) -> Row:
    first = sorted(answer.first_token for answer in answers)
    steps = [
        (answer.last_token - answer.first_token) / (answer.output_tokens - 1)
        for answer in answers
        if answer.output_tokens > 1
    ]
    return {
        "ttft_mean": statistics.mean(first),
        "ttft_p50": _quantile(first, 0.5),
        "ttft_p95": _quantile(first, 0.95),
        "ttft_p99": _quantile(first, 0.99),
        "tpot_p50": statistics.median(steps) if steps else None,
    }


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Of values in ascending order, the smallest that ``share`` of them do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _cpu_seconds(server: ServerProcess) -> float:
    """Processor time of all processes of the server so far."""
    root = psutil.Process(server.pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(t.user + t.system for t in times)

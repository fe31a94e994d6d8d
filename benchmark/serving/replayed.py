"""The same requests in the replay: what the optimum would leave, and what ours is like once it has learnt.

Node-granular, prompts only, device tier only: no generated text, no tiers, and ghosts without limit. The
optimum evicts single pages and knows the future.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmark.serving.workloads import make_workload, prefix_pages
from sgl_importance.observe.shadow.shadow_pair import SERVER_CHUNK_TOKENS
from sgl_importance_lab.replay.policy_registry import IMPORTANCE, OPTIMUM
from sgl_importance_lab.replay.replay_runner import Job, ReplayMode, run_job
from sgl_importance_lab.replay.trace import Trace, TraceBuilder
from sgl_importance_lab.workload.workload_request import WorkloadRequest

POLICIES = ("lru", "slru", "tlru", "lfu", IMPORTANCE, OPTIMUM)
LONGER = 4


def as_trace(name: str, requests: list[WorkloadRequest], page_tokens: int) -> Trace:
    """The whole pages of each prompt as a path in a prefix tree."""
    builder = TraceBuilder(name, page_tokens)
    for request in requests:
        tokens = request.token_ids()
        builder.add(prefix_pages(tokens, page_tokens), input_tokens=len(tokens), seconds=request.seconds)
    return builder.build()


def replay_workload(name: str, parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row per policy and length: the committed number of requests, and ``LONGER`` times as many."""
    page_tokens = parameters["page_tokens"]
    pages = parameters["device_tokens"] // page_tokens
    shape = parameters["workloads"][name]
    for factor in (1, LONGER):
        longer = {**parameters["workloads"], name: {**shape, "requests": factor * shape["requests"]}}
        workload = make_workload(name, {**parameters, "workloads": longer})
        trace = as_trace(name, workload.requests, page_tokens)
        for policy in POLICIES:
            row = run_job([trace], Job(0, policy, pages, ReplayMode.NODES, chunk_tokens=SERVER_CHUNK_TOKENS))
            yield {
                "workload": name,
                "policy": policy,
                "factor": factor,
                "uncached_share": round(1 - row.token_hit_rate, 4),
            }

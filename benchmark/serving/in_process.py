"""The workloads on the real radix tree without a server, under many seeds: how much of a result is luck.

With a pool of a few prompts one victim decides the next, and two equally good policies differ by some
percent on one stream of requests. Here sglang's own tree, its published policies and our component serve
the same requests as the server does, in a second each. Prompts are those of the workload; of the answers only
the length is. One tier, g = 1: the device pool; where there is a host tier, which keeps what the device has
too, one of its size. A control of ours counts what a node's own tokens take to compute, wherever they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from transformers import AutoConfig

from benchmark.serving.arms import BY_DEPTH, OURS, TLRU_CONFIG
from benchmark.serving.workloads import make_workload, prefix_pages
from sgl_importance.embedded_model import checkpoint_path
from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.policy.marginal_loss import ImportancePolicy
from sgl_importance.tiers import Tier
from sgl_importance_lab.offline.standalone_cache import CacheKind
from sgl_importance_lab.offline.tree_replay import TreeReplay
from sgl_importance_lab.study.recording import Query, Recording
from sgl_importance_lab.workload.workload_request import WorkloadRequest
from sglang_importance.tree.nominal_costs import CPU, active_parameters

PUBLISHED_KINDS: tuple[CacheKind, ...] = ("python-lru", "python-slru", "python-tlru", "python-lfu")
ANSWER_TOKENS = 2  # a word and the end
LONGER = 8
LONGER_SEEDS = 3


class WeighsDepth(ImportancePolicy):
    """Control: the loss of a node is what computing its own tokens takes, which grows with their depth."""

    def value(self, tier: Tier, node: NodeMetadata, *, below: Tier | None) -> float:
        assert below is None, "one tier"
        seconds = self.cost.recompute_seconds(node.tokens, node.depth) / node.tokens
        flat: float = super().value(tier, node, below=below)
        return flat * seconds / self.cost.seconds_per_token(None)


OUR_POLICIES = {"importance": ImportancePolicy, BY_DEPTH: WeighsDepth}
ARM_OF = {**dict.fromkeys(OUR_POLICIES, OURS), "python-lru": "LRU (Python core)"}
ARM_OF |= {kind: kind.removeprefix("python-") for kind in PUBLISHED_KINDS if kind not in ARM_OF}


def server_cost() -> CostModel:
    """The cost model of a server on a CPU with the embedded model."""
    config = AutoConfig.from_pretrained(checkpoint_path())
    layers, head_dim = config.num_hidden_layers, config.head_dim
    return CostModel.from_model(
        parameters=active_parameters(config, num_layers=layers, head_dim=head_dim),
        num_layers=layers,
        num_heads=config.num_attention_heads,
        head_dim=head_dim,
        bytes_per_token=2 * 4 * layers * config.num_key_value_heads * head_dim,
        flops_per_second=CPU.flops_per_second,
        host_bytes_per_second=CPU.host_bytes_per_second,
        storage_bytes_per_second=CPU.storage_bytes_per_second,
    )


def as_recording(name: str, requests: list[WorkloadRequest], page_tokens: int) -> Recording:
    """What a server would have recorded of the requests, without attention."""
    numbers: dict[tuple[int, ...], int] = {}
    queries = []
    for clock, request in enumerate(requests, start=1):
        tokens = request.token_ids()
        names = [numbers.setdefault(page, len(numbers)) for page in prefix_pages(tokens, page_tokens)]
        pages = np.array(names, dtype=np.int64)
        answer = request.max_tokens if request.ignore_eos else ANSWER_TOKENS
        queries.append(Query(request.id, clock, pages, pages, len(tokens), answer))
    header = SimpleNamespace(options={"half_life_queries": 32.0})
    recording = SimpleNamespace(
        name=name, page_size=page_tokens, header=header, queries=queries, digests=list(numbers.values())
    )
    return cast(Recording, recording)


def replay_seeds(
    name: str, parameters: dict[str, Any], seeds: int, arms: Collection[str]
) -> Iterator[dict[str, Any]]:
    """One row per seed, policy of the arms and number of requests; the first seed is the committed one.

    Runs that are ``LONGER`` times as long show what is left when there was time to learn; fewer seeds do,
    and those published policies that are not like LRU.
    """
    pages = parameters["device_tokens"] // parameters["page_tokens"]
    if parameters["workloads"][name].get("tiers", "device") != "device":
        pages *= parameters["host_ratio"]
    cost = server_cost()
    for factor, policies in (
        (1, (*PUBLISHED_KINDS, *OUR_POLICIES)),
        (LONGER, ("python-lru", "python-lfu", *OUR_POLICIES)),
    ):
        for seed in [parameters["seed"], *range(1, seeds)][: seeds if factor == 1 else LONGER_SEEDS]:
            recording = as_recording(
                name, _requests(name, parameters, seed, factor), parameters["page_tokens"]
            )
            for kind in (each for each in policies if ARM_OF[each] in arms):
                ours = OUR_POLICIES.get(kind)
                replay = TreeReplay(
                    recording,
                    capacity_pages=pages,
                    kind="importance" if ours else cast(CacheKind, kind),
                    policy=ours(cost, use_importance=False) if ours else None,
                    eviction_config=TLRU_CONFIG if kind == "python-tlru" else None,
                )
                row = {"workload": name, "policy": kind, "seed": seed, "factor": factor}
                yield row | _left_to_compute(replay, cost)


def _requests(name: str, parameters: dict[str, Any], seed: int, factor: int) -> list[WorkloadRequest]:
    shape = parameters["workloads"][name]
    longer = {**parameters["workloads"], name: {**shape, "requests": factor * shape["requests"]}}
    return make_workload(name, {**parameters, "seed": seed, "workloads": longer}).requests


def _left_to_compute(replay: TreeReplay, cost: CostModel) -> dict[str, float]:
    """Share of the prompt tokens that was not found, and of the seconds that computing all would take."""
    tokens = uncached = seconds = spent = 0.0
    for query, cached in replay.run():
        tokens += query.input_tokens
        uncached += query.input_tokens - cached
        seconds += cost.recompute_seconds(query.input_tokens, 0)
        spent += cost.recompute_seconds(query.input_tokens - cached, cached)
    return {"uncached_share": round(uncached / tokens, 4), "seconds_share": round(spent / seconds, 4)}

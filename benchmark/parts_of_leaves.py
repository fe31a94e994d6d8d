"""Whether a victim should be cut from its tail, as vLLM frees pages, instead of evicted whole.

Workloads of the serving benchmark on the real tree without HTTP, with pools of an eighth, a quarter and half
of what the traffic goes on asking for. A cut frees what is asked for, 256 tokens or a quarter of the node,
whichever is most; the evidence of the node's life stays with its front, which a turn still ends at.

    python benchmark/parts_of_leaves.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from results import RESULTS, rows_so_far, write_results
from rich.progress import track

from sgl_importance.policy.marginal_loss import ImportancePolicy
from sgl_importance_lab.offline.tree_replay import TreeReplay
from sglang_importance.cache.component import ImportanceComponent

sys.path += [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "test")]

from benchmark.serving.in_process import as_recording, server_cost
from benchmark.serving.workloads import load_parameters, make_workload

PAGE = 16
LEAST_TOKENS = 256
NEED = {"documents": 13_312, "scan": 12_288, "chat": 16_384}
"""Tokens: all documents; what comes between two questions about one of the hot two; the live sessions."""
CELLS = [("agents", f"agents-{times}x", 4096, f"1/{times}") for times in (8, 4, 2)]
CELLS += [
    (name, name, need // times // PAGE * PAGE, f"1/{times}")
    for name, need in NEED.items()
    for times in (8, 4, 2)
]
CELLS += [("long", "long", 9728, "1/4")]
LONG = {
    "kind": "conversations", "requests": 160, "sessions": 10, "rate": 4, "system_tokens": 512,
    "first_tokens": 512, "turn_tokens": 512, "turn_sigma": 0.3, "turns": [6, 6], "gap_sigma": 0.61,
}


class Cuts:
    """In place of the walk's next victim: its tail, cut off."""

    def __init__(self) -> None:
        self.victims = self.cut = 0
        self._whole = ImportanceComponent._evict_device_next_node

    def arm(self, *, cuts: bool) -> None:
        self.victims = self.cut = 0
        whole = self._whole
        this = self

        def next_node(component: ImportanceComponent, tracker: Any, *args: Any, **named: Any) -> Any:
            victim = whole(component, tracker, *args, **named)
            if victim is not None:
                this.take(component, victim, tracker)
            return victim

        ImportanceComponent._evict_device_next_node = next_node if cuts else whole

    def take(self, component: ImportanceComponent, victim: int, tracker: Any) -> None:
        core, tree = component.tree_core, component.state.tree
        node = core.node_by_id(victim)
        asked = component._evict_device_request_cnt - tracker[component.component_type]
        tail = -int(-max(asked, LEAST_TOKENS, len(node.key) / 4) // PAGE) * PAGE
        self.victims += 1
        if tail >= len(node.key):
            return
        self.cut += 1
        is_tip, used = tree.metadata(node).is_tip, node.last_access_time
        front, action = core._split_node(node.key, node, len(node.key) - tail)
        assert action is None
        front.last_access_time = node.last_access_time = used
        behind = tree.metadata(node)
        if behind.at_risk_as is not None:  # a split lets both parts live; the front alone does
            component.state.policy.reuse.forgotten(behind.at_risk_as, behind.last_access)
            behind.at_risk_as = None
        tree.metadata(front).is_tip = is_tip


def main(
    seeds: Annotated[int, typer.Option(min=1, help="The committed one, and 1, 2, ...")] = 10,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the rows that are there.")] = False,
    out: Annotated[Path, typer.Option(help="JSON file.")] = RESULTS / "parts_of_leaves.json",
) -> None:
    """Measures and writes the results."""
    parameters = load_parameters()
    parameters["workloads"]["long"] = LONG
    cost, cuts = server_cost(), Cuts()
    rows = rows_so_far(out) if resume else []
    done = {(row["stream"], row["pool"], row["seed"], row["arm"]) for row in rows}
    for seed in track([parameters["seed"], *range(1, seeds)]):
        for workload, stream, pool, share in CELLS:
            made = None
            for arm in ("whole", "cut"):
                if (stream, pool, seed, arm) in done:
                    continue
                made = made or make_workload(stream, {**parameters, "seed": seed}).requests
                cuts.arm(cuts=arm == "cut")
                policy = ImportancePolicy(cost, use_importance=False)
                replay = TreeReplay(
                    as_recording(stream, made, PAGE), capacity_pages=pool // PAGE, policy=policy
                )
                served = [(query.input_tokens, found) for query, found in replay.run()]
                replay._cache.importance.check_integrity()
                row = {"workload": workload, "stream": stream, "pool": pool, "share": share, "seed": seed}
                row |= {"arm": arm, "computed": sum(tokens - found for tokens, found in served)}
                row |= {"prompt_tokens": sum(tokens for tokens, _ in served)}
                rows.append(row | {"victims": cuts.victims, "cuts": cuts.cut})
        write_results("parts_of_leaves", rows, out=out)


if __name__ == "__main__":
    typer.run(main)

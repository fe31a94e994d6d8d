"""What stock's rule, vLLM's and ours compute of the prompts of benchmark/peers, by the size of the pool.

    python benchmark/peers/sizes.py --data DIR --model .cache/models/smollm2

Replayed, one request at a time: stock and ours through shadow caches, which compute what servers do with
their device alone; vLLM's order by benchmark/peers/vllm_blocks.py. ``ours (told)``: each session says when it
is over. A pool that does not hold the longest prompt is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.peers.check_vllm_blocks import computed_of
from benchmark.peers.learnt import server, shadow
from benchmark.peers.run import ANSWER_TOKENS, kept_workload
from benchmark.peers.victims import SEEDS, Foresight, Future, each_computed, trace_of
from benchmark.peers.workloads import PAGE, UNIQUE, WORKLOADS, Sent, Texts
from benchmark.results import RESULTS, rows_so_far, write_results
from sgl_importance.observe.shadow.shadow_ranking import LruShadowRanking
from sgl_importance_lab.replay.served_nodes import ServedPages

SHARES = (1 / 8, 1 / 4, 1 / 2)
TOLD = "agents"
"""The workload that says which turn was a session's last."""


def counts_of(requests: Sequence[Sent], pool: int, *, told: bool) -> dict[str, int] | None:
    """Prompt tokens that each order computes; None where a prompt does not fit.

    Args:
        pool: tokens on the device.
        told: whether to count ``ours (told)``, too.
    """
    pages = pool // PAGE
    if any(len(request.ids) + ANSWER_TOKENS + PAGE > pool for request in requests):
        return None
    trace = trace_of(requests)
    served = ServedPages(trace)
    future = Future(served, trace.num_requests)
    every = range(trace.num_requests)
    caches = {
        "lru": shadow(pages, LruShadowRanking()),
        "ours": server(pages),
        "foresight": shadow(pages, Foresight(future)),
    }
    counts = {name: sum(each_computed(trace, served, cache, every, future)) for name, cache in caches.items()}
    counts["vllm"] = computed_of(requests, pool)
    if told:
        counts["ours (told)"] = sum(each_computed(trace, served, server(pages), every, future, told=requests))
    return counts


def main(
    data: Annotated[Path, typer.Option(help="Folder with agents/ and prompts/.")],
    model: Annotated[Path, typer.Option(help="Folder of a model, as scripts/get_model.py prints it.")],
    workloads: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(WORKLOADS),
    seeds: Annotated[int, typer.Option(min=1, max=SEEDS, help="How many.")] = SEEDS,
    resume: Annotated[bool, typer.Option(help="Replay only what the JSON lacks.")] = False,
    out: Annotated[Path, typer.Option(help="The JSON.")] = RESULTS / "peers_sizes.json",
) -> None:
    texts = Texts(data, Tokenizer.from_file(str(model / "tokenizer.json")))
    rows: list[dict[str, Any]] = rows_so_far(out) if resume else []
    known = {(row["workload"], row["share"], row["seed"]) for row in rows}
    cells = [
        (name, share, seed)
        for name in workloads.split(",")
        for share in SHARES
        for seed in range(1, seeds + 1)
        if (name, share, seed) not in known
    ]
    for name, share, seed in track(cells, description="replaying"):
        requests, pool = kept_workload(name, seed, lambda: texts), int(UNIQUE[name] * share)
        counts = counts_of(requests, pool, told=name == TOLD)
        key = {"workload": name, "share": share, "seed": seed, "pool": pool, "requests": len(requests)}
        rows.append({**key, "fits": counts is not None, **(counts or {})})
        write_results("peers_sizes", rows, out=out)


if __name__ == "__main__":
    typer.run(main)

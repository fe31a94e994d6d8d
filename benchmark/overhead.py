"""What `--kv-policy importance` costs a whole server, beside stock, in one run.

Both servers are up at once and take turns round by round; a ratio compares the two rounds of one turn, so
that a noisy machine is noisy for both. A third arm, stock with the Python tree core, tells the price of
the tree core from ours. `emission.py` and `tree.py` have the single parts in detail.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import emission
import torch
import tree
import typer
from results import print_rows, write_results
from rich.progress import track

from sgl_importance.embedded_model import checkpoint_path
from sgl_importance.metrics_table import PREFIX
from sgl_importance_lab.probe.tasks import make_document
from sgl_importance_lab.probe.tokenizer import encode
from sgl_importance_lab.study.statistics import median_of
from sglang_importance.cpu.attention import DecodeCopiesContext, ExtendComputesCachedRows
from sglang_importance.cpu.shim import apply_needed

sys.path.append(str(Path(__file__).parents[1] / "test"))
from support.servers import ServerProcess

CONCURRENCY = 4
FLAGS = ("--page-size", "16", "--max-total-tokens", "16384")
ARMS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "stock": (("--kv-policy", "default"), {}),
    "stock, Python tree core": (
        ("--kv-policy", "default"),
        {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"},
    ),
    "importance": (("--kv-policy", "importance"), {}),
}


def shared_documents(seed: int) -> list[tuple[list[int], int]]:
    """Questions about shared documents: mostly cached prefixes, short answers."""
    prompts = []
    for document_seed in range(seed, seed + 4):
        document = make_document(1000, document_seed)
        prompts += [(encode(document.messages(name)), 4) for name in list(document.records)[:6]]
    random.Random(seed).shuffle(prompts)
    return prompts


def long_generation(seed: int) -> list[tuple[list[int], int]]:
    """Few prompts, many decode steps."""
    documents = (make_document(500, 10_000 + seed + i) for i in range(4))
    return [(encode(document.messages(next(iter(document.records)))), 96) for document in documents]


def unique_prompts(seed: int) -> list[tuple[list[int], int]]:
    """Nothing shared: all prefill, and a pool under eviction."""
    documents = (make_document(1500, 100_000 + 16 * seed + i) for i in range(8))
    return [(encode(document.messages(next(iter(document.records)))), 2) for document in documents]


WORKLOADS: dict[str, Callable[[int], list[tuple[list[int], int]]]] = {
    "shared documents": shared_documents,
    "long generation": long_generation,
    "unique prompts": unique_prompts,
}


def seconds(server: ServerProcess, prompts: list[tuple[list[int], int]]) -> float:
    def run(prompt: tuple[list[int], int]) -> None:
        server.generate(prompt[0], max_new_tokens=prompt[1], ignore_eos=True)

    start = time.perf_counter()
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        list(pool.map(run, prompts))
    return time.perf_counter() - start


def parts_of_a_step() -> list[dict[str, Any]]:
    """What an emitting pass adds to the attention of all layers."""
    torch.set_num_threads(1)
    apply_needed((ExtendComputesCachedRows(), DecodeCopiesContext()))
    with torch.inference_mode():
        measured = [emission.measure(workload, layers=4, rounds=50) for workload in emission.WORKLOADS]
    return [
        {
            "part": f"emitting {row['pass']}, batch {row['batch']}, context {row['context']}",
            "added_microseconds": row["added_us"],
        }
        for row in measured
    ]


def fold_part(server: ServerProcess) -> dict[str, Any]:
    seconds_spent = server.metric(f"{PREFIX}fold_seconds_total")
    return {"part": "fold", "added_microseconds": 1e6 * seconds_spent / server.metric(f"{PREFIX}folds_total")}


def eviction_part(leaves: int = 10_000) -> dict[str, Any]:
    """One eviction beside stock LRU on the same, Python tree core; negative where ours is faster."""
    rows = tree.measure(leaves, rounds=50, operations=("evict_one",))
    times = {row["cache"]: row["microseconds"] for row in rows}
    return {
        "part": f"evict one of {leaves} leaves",
        "added_microseconds": times["importance"] - times["python-lru"],
    }


def main(
    rounds: Annotated[int, typer.Option(help="alternations for each workload")] = 12,
    out: Annotated[Path | None, typer.Option(help="JSON file")] = None,
) -> None:
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        servers = {
            arm: stack.enter_context(ServerProcess(*FLAGS, *flags, model=checkpoint_path(), env=env))
            for arm, (flags, env) in ARMS.items()
        }
        for workload, make_prompts in WORKLOADS.items():
            times: dict[str, list[float]] = {arm: [] for arm in servers}
            for turn in track(range(rounds + 1), workload):
                # Who comes first changes from turn to turn; the first turn only warms up.
                arms = list(servers)[turn % len(servers) :] + list(servers)[: turn % len(servers)]
                prompts = make_prompts(100 * turn)
                for arm in arms:
                    took = seconds(servers[arm], prompts)
                    if turn:
                        times[arm].append(took)
            for arm, values in times.items():
                ratios = [ours / stock for ours, stock in zip(values, times["stock"], strict=True)]
                ratio = median_of(ratios)
                rows.append(
                    {
                        "workload": workload,
                        "arm": arm,
                        "seconds": statistics.median(values),
                        "ratio_to_stock": ratio.value,
                        "low": ratio.low,
                        "high": ratio.high,
                    }
                )
        parts = [*parts_of_a_step(), fold_part(servers["importance"]), eviction_part()]
    print_rows("Whole server, beside stock", rows)
    print_rows("Single parts", parts)
    print(write_results("overhead", [*rows, *parts], out=out))


if __name__ == "__main__":
    typer.run(main)

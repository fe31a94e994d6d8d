"""How fast traces replay: block accesses a second of every policy, and eight policies at eight capacities.

Every policy takes its turn within one run; times_definition compares with LRU in the readable cache. Rows of
policies count processor time, which other work on the machine disturbs least; the grid's row has both.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from results import print_rows, write_results
from rich.progress import track

from sgl_importance_lab.policies.lru import LruPolicy
from sgl_importance_lab.replay.cache import replay_tree
from sgl_importance_lab.replay.equivalent import lru_curve
from sgl_importance_lab.replay.formats.detect import read_trace
from sgl_importance_lab.replay.policy_registry import POLICY_NAMES
from sgl_importance_lab.replay.replay_runner import Job, ReplayMode, choose_replay, run_job, run_jobs
from sgl_importance_lab.replay.trace import Trace, TraceBuilder

GRID_POLICIES = ("lru", "lfu", "mq", "s3fifo", "arc", "gdsf", "importance", "belady")
GRID_FRACTIONS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
CAPACITY_FRACTION = 0.05


def synthetic_sessions(requests: int, seed: int = 0) -> Trace:
    """Sessions that grow turn by turn behind one shared block; a third of the requests start a new one."""
    random = np.random.default_rng(seed)
    builder = TraceBuilder("synthetic", 512)
    sessions: list[list[int]] = []
    blocks = 1
    for second in range(requests):
        if not sessions or random.random() < 1 / 3:
            sessions.append([0])
        # The last hundred sessions are alive, the youngest most likely to speak again.
        path = sessions[-1 - min(int(random.exponential(20)), len(sessions) - 1, 99)]
        added = int(random.geometric(1 / 12))
        path.extend(range(blocks, blocks + added))
        blocks += added
        builder.add(path, input_tokens=512 * len(path), seconds=float(second))
    return builder.build()


def best_seconds(action: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        action()
        best = min(best, time.process_time() - start)
    return best


def processor_seconds() -> float:
    """Of this process and of its children that have ended."""
    return sum(os.times()[:4])


def main(
    trace_file: Annotated[Path | None, typer.Option("--trace", help="A trace instead of a made one.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of the made trace.")] = 12_000,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each policy; the best counts.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Processes of the grid.")] = os.cpu_count() or 1,
    out: Annotated[Path | None, typer.Option(help="Result file.")] = None,
) -> None:
    """Measures and writes the results."""
    trace = synthetic_sessions(requests) if trace_file is None else read_trace(trace_file)
    capacity = max(1, int(CAPACITY_FRACTION * trace.num_blocks))
    definition = best_seconds(lambda: replay_tree(trace, LruPolicy(capacity)), repeats)
    seconds = {"lru, definition": definition}
    for policy in track(POLICY_NAMES, "policies"):
        replay = choose_replay(policy, ReplayMode.TREE)
        replay(trace, capacity)  # compiles what is compiled
        seconds[policy] = best_seconds(lambda replay=replay: replay(trace, capacity), repeats)
    lru_curve(trace)
    seconds["lru, all capacities"] = best_seconds(lambda: lru_curve(trace), repeats)
    rows: list[dict[str, Any]] = [
        {
            "what": what,
            "trace": trace.name,
            "accesses": trace.num_accesses,
            "seconds": taken,
            "wall_seconds": None,
            "million_per_second": trace.num_accesses / taken / 1e6,
            "times_definition": definition / taken,
        }
        for what, taken in seconds.items()
    ]
    grid = [
        Job(0, policy, max(1, int(fraction * trace.num_blocks)))
        for policy in GRID_POLICIES
        for fraction in GRID_FRACTIONS
    ]
    start, processor_start = time.perf_counter(), processor_seconds()
    results = list(track(run_jobs(run_job, [trace], grid, jobs), "grid", total=len(grid)))
    taken = time.perf_counter() - start
    processor_taken = processor_seconds() - processor_start
    accesses = len(results) * trace.num_accesses
    rows.append(
        {
            "what": f"{len(GRID_POLICIES)} policies x {len(GRID_FRACTIONS)} capacities, {jobs} processes",
            "trace": trace.name,
            "accesses": accesses,
            "seconds": processor_taken,
            "wall_seconds": taken,
            "million_per_second": accesses / processor_taken / 1e6,
            "times_definition": definition * len(grid) / processor_taken,
        }
    )
    print_rows("replay", rows)
    typer.echo(f"written to {write_results('replay', rows, out=out)}")


if __name__ == "__main__":
    typer.run(main)

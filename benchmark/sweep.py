"""A sweep of replays in a process pool and on a Ray cluster of this machine: same rows, and cells a second.

Cells are made traces x policies x capacities x seeds. The cluster has one node of one core for each process
of the pool; its start is not counted, that of its workers is, as in the pool. Both take turns.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from replay import synthetic_sessions
from results import print_rows, write_results
from rich.progress import track

from sgl_importance_lab.replay.ray_cluster import RayCluster
from sgl_importance_lab.replay.replay_runner import Job, Row, run_job, run_jobs

POLICIES = ("lru", "lfu", "lhd", "importance", "belady")
FRACTIONS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.2, 0.5, 1.0)
TRACES = 5
POOL, RAY = "process pool", "Ray"
NODE = {"num_cpus": 1, "object_store_memory": 200 << 20}


@contextmanager
def ray_cluster(nodes: int) -> Iterator[RayCluster]:
    """Nodes of one core each, on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # on a busy machine
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        for _ in range(nodes - 1):
            cluster.add_node(**NODE)
        yield RayCluster(cluster.address)
    finally:
        cluster.shutdown()


def main(
    requests: Annotated[int, typer.Option(min=1, help="Requests of each made trace.")] = 100,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each cell.")] = 4,
    workers: Annotated[int, typer.Option(min=2, help="Processes, and nodes of the cluster.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each; the median counts.")] = 3,
    out: Annotated[Path | None, typer.Option(help="JSON file.")] = None,
) -> None:
    """Measures and writes the results."""
    traces = [synthetic_sessions(requests, seed) for seed in range(TRACES)]
    jobs = [
        Job(index, policy, max(1, int(fraction * trace.num_blocks)), seed=seed)
        for index, trace in enumerate(traces)
        for policy in POLICIES
        for fraction in FRACTIONS
        for seed in range(seeds)
    ]
    seconds: dict[str, list[float]] = {POOL: [], RAY: []}
    expected: list[Row] | None = None
    with ray_cluster(workers) as cluster:
        for _ in track(range(repeats), "sweeps"):
            for name, place in ((POOL, workers), (RAY, cluster)):
                start = time.perf_counter()
                found = dict(run_jobs(run_job, traces, jobs, place))
                seconds[name].append(time.perf_counter() - start)
                rows = [replace(found[index], seconds=0.0) for index in range(len(jobs))]
                expected = expected or rows
                assert rows == expected, f"{name} has other rows"
    results: list[dict[str, Any]] = [
        {
            "workers": name,
            "cores": workers,
            "cells": len(jobs),
            "accesses": sum(traces[job.trace].num_accesses for job in jobs),
            "seconds": statistics.median(taken),
            "cells_per_second_and_core": len(jobs) / statistics.median(taken) / workers,
            "least_seconds": min(taken),
            "most_seconds": max(taken),
        }
        for name, taken in seconds.items()
    ]
    print_rows("The same rows", results)
    typer.echo(f"written to {write_results('sweep', results, out=out)}")


if __name__ == "__main__":
    typer.run(main)

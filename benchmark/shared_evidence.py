"""Would two servers learn faster from one ledger's life tables than each from its own?

    python benchmark/shared_evidence.py mooncake_conversation.jsonl

Conversations of Mooncake are dealt to two servers by chance, each with a cache of its own. Arms: each learns
``alone``; ``shared``: the index of each is computed from the evidence of both, summed up to the same number
of requests, which is what a ledger could tell without delay; ``all learnt``: each begins with the evidence of
its own whole hour, more than any sharing can bring.

What is learnt does not depend on the cache, so the other server's evidence is read off a replay of its own.
A row is a length of the traffic, in requests of each server, and an arm; ``computed`` is the ratio of
computed blocks to those of ``alone``, mean over deals, servers and sizes, with a 95 % interval over deals
(Student's t).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer
from intervals import interval
from policy import window
from results import RESULTS, print_rows, write_results
from rich.progress import track

from sgl_importance.reuse.hazards import PRIORS, Priors, hazards
from sgl_importance.reuse.life_table import FloatArray, IntArray
from sgl_importance_lab.replay.compiled import fast_importance
from sgl_importance_lab.replay.formats.detect import read_trace
from sgl_importance_lab.replay.sessions import access_classes
from sgl_importance_lab.replay.trace import Trace, TraceBuilder

FRACTIONS = (0.01, 0.05)
LENGTHS = (250, 500, 1000, 2000)
ALONE, SHARED, LEARNT = "alone", "shared", "all learnt"

Counts = tuple[dict[int, FloatArray], dict[int, FloatArray]]
"""Hits and intervals that reached each bucket, by class."""
Hazards = Callable[..., FloatArray]


def deal(trace: Trace, seed: int) -> tuple[Trace, Trace]:
    """The conversations on two servers: requests with the same second block stay together."""
    rng = random.Random(seed)
    server_of: dict[int, int] = {}
    builders = [TraceBuilder(f"server {number}", trace.block_tokens) for number in range(2)]
    for request in range(trace.num_requests):
        path = trace.request(request).tolist()
        server = server_of.setdefault(path[min(1, len(path) - 1)], rng.randrange(2))
        builders[server].add(
            path,
            input_tokens=int(trace.input_tokens[request]),
            output_tokens=int(trace.output_tokens[request]),
            seconds=float(trace.seconds[request]),
        )
    first, second = (builder.build() for builder in builders)
    return first, second


def evidence_of(trace: Trace) -> list[Counts]:
    """What the replay knows at each computation of the index, the first of which is at its start."""
    numbers = access_classes(trace).numbers.tolist()
    found: list[Counts] = []

    def noting(
        hits: FloatArray, reached: FloatArray, levels: IntArray, priors: Priors = PRIORS
    ) -> FloatArray:
        rows = [row for row in range(len(numbers)) if reached[row].any()]
        found.append(
            (
                {numbers[row]: hits[row].copy() for row in rows},
                {numbers[row]: reached[row].copy() for row in rows},
            )
        )
        return hazards(hits, reached, levels, priors)

    with patch.object(fast_importance, "hazards", noting):
        fast_importance.replay_importance(trace, 1)
    return found


def told(numbers: list[int], other: Callable[[int], Counts]) -> Hazards:
    """Hazards with another's evidence added; ``other``: by the number of the computation."""
    times = 0

    def hazards_of_both(
        hits: FloatArray, reached: FloatArray, levels: IntArray, priors: Priors = PRIORS
    ) -> FloatArray:
        nonlocal times
        more_hits, more_reached = other(times)
        times += 1
        hits, reached = hits.copy(), reached.copy()
        for row, number in enumerate(numbers):
            if number in more_reached:
                hits[row] += more_hits[number]
                reached[row] += more_reached[number]
        return hazards(hits, reached, levels, priors)

    return hazards_of_both


def computed(trace: Trace, capacity: int, estimate: Hazards) -> int:
    with patch.object(fast_importance, "hazards", estimate):
        return trace.num_accesses - fast_importance.replay_importance(trace, capacity).hit_blocks


def ratios(trace: Trace, seed: int) -> dict[tuple[int, str], float]:
    """Of one deal, by length and arm."""
    servers = deal(trace, seed)
    known = [evidence_of(server) for server in servers]
    logs: dict[tuple[int, str], list[float]] = {}
    for number, server in enumerate(servers):
        other, own = known[1 - number], known[number]
        for length in LENGTHS:
            part = window(server, server.name, 0, min(length, server.num_requests))
            numbers = access_classes(part).numbers.tolist()
            for fraction in FRACTIONS:
                capacity = max(1, int(fraction * server.num_blocks))
                alone = computed(part, capacity, hazards)
                for arm, evidence in (
                    (SHARED, lambda times, other=other: other[min(times, len(other) - 1)]),
                    (LEARNT, lambda times, own=own: own[-1]),
                ):
                    ratio = computed(part, capacity, told(numbers, evidence)) / alone
                    logs.setdefault((length, arm), []).append(float(np.log(ratio)))
    return {cell: float(np.mean(values)) for cell, values in logs.items()}


def main(
    mooncake: Annotated[Path, typer.Argument(help="mooncake_conversation.jsonl.")],
    deals: Annotated[int, typer.Option(min=2, max=10, help="Of the conversations to the servers.")] = 5,
    out: Annotated[Path, typer.Option(help="JSON file.")] = RESULTS / "shared_evidence.json",
) -> None:
    """Measures and writes the results."""
    trace = read_trace(mooncake)
    by_cell: dict[tuple[int, str], list[float]] = {}
    rows: list[dict[str, Any]] = []
    for seed in track(range(deals), description="deals"):
        for cell, value in ratios(trace, seed).items():
            by_cell.setdefault(cell, []).append(value)
        rows = []
        for (length, arm), values in by_cell.items():
            mean, low, high = (float(np.exp(each)) for each in interval(values))
            row = {"requests": length, "arm": arm, "computed": mean, "low": low, "high": high}
            rows.append(row | {"deals": len(values)})
        write_results("shared_evidence", rows, out=out)
    print_rows(f"Computed blocks over those of {ALONE}", rows)
    typer.echo(f"written to {out}")


if __name__ == "__main__":
    typer.run(main)

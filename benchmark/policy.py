"""How much of the optimum each policy reaches, on traces it was tuned on and on others; and why not more.

Hit rates are deterministic: the rows can be compared between machines. ``importance`` runs with g = 1, since
a trace without attention says nothing else. Arms beside the published policies:

- ``one class``: no block type, transition or visits, one hazard for all;
- ``no visits``, ``no structure``: without the one or the other half of a class;
- ``second hour``: the trace is replayed behind a copy of itself with other blocks, so that everything that a
  life table can learn is learnt before the part that is measured;
- ``told who returns``: the class also says whether the block is ever asked for again. What is missing
  behind it is when, what is missing before it is who.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from halves import starts
from results import print_rows, write_results
from rich.progress import track

from sgl_importance.reuse.reuse_class import NUM_VISIT_LEVELS
from sgl_importance_lab.replay.compiled.fast_importance import replay_importance
from sgl_importance_lab.replay.formats.detect import read_trace
from sgl_importance_lab.replay.formats.line_reader import ReadOptions
from sgl_importance_lab.replay.policy_registry import IMPORTANCE, OPTIMUM
from sgl_importance_lab.replay.replay_runner import Job, run_job, run_jobs
from sgl_importance_lab.replay.sessions import BlockFacts, block_facts
from sgl_importance_lab.replay.trace import Trace, TraceBuilder

FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.2)
PUBLISHED = ("lru", "fifo", "random", "lfu", "slru", "tlru", "mq", "s3fifo", "arc", "gdsf", "lhd")
SESSIONS_AT_A_TIME = 8
AGENT_BLOCK_BYTES = 64  # about 16 tokens


def capacities(trace: Trace) -> list[int]:
    return [max(1, int(fraction * trace.num_blocks)) for fraction in FRACTIONS]


def window(trace: Trace, name: str, first: int, stop: int) -> Trace:
    """Requests [first, stop) as a trace of their own, which knows nothing of what came before."""
    builder = TraceBuilder(name, trace.block_tokens)
    for request in range(first, stop):
        builder.add(
            trace.request(request).tolist(),
            input_tokens=int(trace.input_tokens[request]),
            output_tokens=int(trace.output_tokens[request]),
            seconds=float(trace.seconds[request]),
        )
    return builder.build()


def twice(trace: Trace) -> Trace:
    """The trace behind a copy of itself that shares no block with it."""
    assert trace.parents is not None
    shift = trace.num_blocks
    return replace(
        trace,
        name=f"{trace.name} twice",
        blocks=np.concatenate((trace.blocks, trace.blocks + shift)),
        offsets=np.concatenate((trace.offsets, trace.offsets[1:] + trace.offsets[-1])),
        parents=np.concatenate((trace.parents, np.where(trace.parents < 0, -1, trace.parents + shift))),
        input_tokens=np.tile(trace.input_tokens, 2),
        output_tokens=np.tile(trace.output_tokens, 2),
        seconds=np.concatenate((trace.seconds, trace.seconds + trace.seconds[-1])),
        answer_ends=np.tile(trace.answer_ends, 2),
    )


def interleaved_sessions(folder: Path, name: str, seed: int) -> Trace:
    """Agent sessions of a folder, ``SESSIONS_AT_A_TIME`` of them alive at a time and taking random turns."""
    sessions = [path.read_text().splitlines() for path in sorted(folder.glob("*.jsonl"))]
    order = random.Random(seed)
    order.shuffle(sessions)
    waiting, alive, lines = sessions[::-1], [], []
    while waiting or alive:
        while waiting and len(alive) < SESSIONS_AT_A_TIME:
            alive.append(iter(waiting.pop()))
        session = order.choice(alive)
        record = next(session, None)
        if record is None:
            alive.remove(session)
        else:
            lines.append(json.dumps({**json.loads(record), "timestamp": len(lines)}))
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "sessions.jsonl"
        path.write_text("\n".join(lines) + "\n")
        trace = read_trace(path, ReadOptions(block_tokens=AGENT_BLOCK_BYTES))
    return replace(trace, name=name)


def arms(trace: Trace) -> Iterator[tuple[str, list[float]]]:
    """Hit rates of the ablations, by capacity: all by classes of nodes, none by turns."""
    facts = block_facts(trace)
    yield "classes alone", _hit_rates(trace, facts)
    last_access = np.full(trace.num_blocks, -1, dtype=np.int64)
    last_access[trace.blocks] = np.arange(trace.num_accesses)  # of equal indices the last one stays
    returns = (last_access[trace.blocks] != np.arange(trace.num_accesses)).astype(np.int64)
    unvisited = np.zeros(trace.num_accesses, dtype=np.int64)
    classes = {
        "one class": unvisited,
        "no visits": facts.reuse_classes // NUM_VISIT_LEVELS,
        "no structure": facts.reuse_classes % NUM_VISIT_LEVELS,
        "told who returns": facts.reuse_classes * 2 + returns,
    }
    for name, reuse_classes in classes.items():
        levels = facts.visit_levels if name in ("no structure", "told who returns") else unvisited
        yield name, _hit_rates(trace, replace(facts, reuse_classes=reuse_classes, visit_levels=levels))
    doubled = twice(trace)
    rates = []
    for capacity in capacities(trace):
        first = replay_importance(trace, capacity, facts).hit_blocks
        both = replay_importance(doubled, capacity).hit_blocks
        rates.append((both - first) / trace.num_accesses)
    yield "second hour", rates


def _hit_rates(trace: Trace, facts: BlockFacts) -> list[float]:
    return [
        replay_importance(trace, capacity, facts).hit_blocks / trace.num_accesses
        for capacity in capacities(trace)
    ]


def summary(
    trace: Trace, policy: str, rates: Sequence[float], known: dict[str, Sequence[float]]
) -> dict[str, Any]:
    """One row: hit rates by budget, and what they are beside LRU, the optimum and the published best."""
    rate, lru, optimum = (np.array(values) for values in (rates, known["lru"], known[OPTIMUM]))
    best = np.max([known[name] for name in PUBLISHED], axis=0)
    gap = optimum - lru
    closed = np.divide(rate - lru, gap, out=np.zeros_like(gap), where=gap > 0)
    return {
        "trace": trace.name,
        "policy": policy,
        **{f"{fraction:.0%}": float(value) for fraction, value in zip(FRACTIONS, rate, strict=True)},
        "over_lru": float((rate / lru).mean()),
        "gap_closed": float(closed.mean()),
        "least_beside_best_published": float((rate - best).min()),
    }


def main(
    mooncake: Annotated[Path, typer.Option(help="mooncake_conversation.jsonl (scripts name its source).")],
    agents: Annotated[
        Path | None, typer.Option(help="Folder with folders of agent sessions (.jsonl).")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes.")] = os.cpu_count() or 1,
    out: Annotated[Path | None, typer.Option(help="JSON file.")] = None,
) -> None:
    whole = replace(read_trace(mooncake), name="mooncake")
    requests = whole.num_requests
    traces = [
        whole,
        window(whole, "first half (tuned on)", 0, requests // 2),
        window(whole, "second half (held out)", requests // 2, requests),
        *(
            window(whole, f"random half {i}", start, start + requests // 2)
            for i, start in enumerate(starts(requests))
        ),
    ]
    if agents is not None:
        for folder in sorted(path for path in agents.iterdir() if path.is_dir()):
            traces += [
                interleaved_sessions(folder, f"{folder.name}, order {seed}", seed) for seed in range(3)
            ]
    policies = (*PUBLISHED, IMPORTANCE, OPTIMUM)
    work = [
        Job(index, policy, capacity)
        for index, trace in enumerate(traces)
        for policy in policies
        for capacity in capacities(trace)
    ]
    rates: dict[tuple[int, str], dict[int, float]] = {}
    for index, row in track(run_jobs(run_job, traces, work, jobs), total=len(work), description="replaying"):
        job = work[index]
        rates.setdefault((job.trace, job.policy), {})[job.capacity] = row.block_hit_rate
    rows = []
    for index, trace in track(list(enumerate(traces)), description="ablations"):
        known = {policy: [rates[index, policy][c] for c in capacities(trace)] for policy in policies}
        rows += [summary(trace, policy, known[policy], known) for policy in policies]
        if "random" not in trace.name:
            rows += [summary(trace, name, values, known) for name, values in arms(trace)]
    print_rows("Hit rates by share of the unique blocks", rows)
    print(f"written: {write_results('policy', rows, out=out)}")


if __name__ == "__main__":
    typer.run(main)

"""A day of production traffic through a replay: how long it takes, and how much memory.

The day is made from recorded traces, in memory, and never written. Each tenant repeats one of the traces
until the day is over, at an offset of its own. There are as many tenants as the block accesses want that are
asked for, and the day ends with the last of these. Blocks that at least a hundredth of a trace's requests ask
for (system prompts) are the same in all repetitions, all others are new in each. Each row is a process of its
own, so that its peak is.
"""

from __future__ import annotations

import resource
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import typer
from results import print_rows, write_results

from sgl_importance_lab.replay.formats.detect import FORMATS_OF_SESSIONS, detect_reader, read_trace
from sgl_importance_lab.replay.formats.line_reader import ReadOptions
from sgl_importance_lab.replay.replay_runner import ReplayMode, choose_replay
from sgl_importance_lab.replay.trace import NO_PARENT, IntArray, Trace

DAY_SECONDS = 86_400.0
BLOCK_TOKENS = 512
SHARED_BY = 100  # a block is shared if one in so many requests asks for it
KIB = 1024


class _Copies(NamedTuple):
    """Repetitions of traces; the arrays of all traces one after the other."""

    copy_of: npt.NDArray[np.int32]  # by request of the day
    request_of: npt.NDArray[np.int32]  # by request of the day: which one of its trace
    trace_of: npt.NDArray[np.int32]  # by copy
    base: IntArray  # by copy: where its names begin
    names: npt.NDArray[np.int32]  # by block of all copies, NO_PARENT before it appears
    shared_names: npt.NDArray[np.int32]  # by block of all traces
    is_shared: npt.NDArray[np.bool_]  # by block of all traces
    first_block: IntArray  # by trace
    first_access: IntArray  # by trace
    first_offset: IntArray  # by trace
    blocks: IntArray
    offsets: IntArray


def make_day(traces: list[Trace], accesses: int, seed: int) -> Trace:
    """The first ``accesses`` block accesses, but for a part of a request, of a day."""
    random = np.random.default_rng(seed)
    copies: list[tuple[int, float]] = []
    tenants, planned = 0, 0.0
    while planned < accesses:
        number = tenants % len(traces)
        trace = traces[number]
        lasts = float(trace.seconds[-1] - trace.seconds[0]) * (1 + 1 / trace.num_requests)
        starts = np.arange(-random.random() * lasts, DAY_SECONDS, lasts)
        copies += [(number, float(start)) for start in starts]
        planned += trace.num_accesses * DAY_SECONDS / lasts
        tenants += 1
    seconds, copy_of, request_of, lengths = [], [], [], []
    for copy, (number, start) in enumerate(copies):
        trace = traces[number]
        arrivals = trace.seconds - trace.seconds[0] + start
        kept = np.flatnonzero((arrivals >= 0) & (arrivals < DAY_SECONDS))
        seconds.append(arrivals[kept])
        copy_of.append(np.full(len(kept), copy, dtype=np.int32))
        request_of.append(kept.astype(np.int32))
        lengths.append(np.diff(trace.offsets)[kept])
    arrived = np.concatenate(seconds)
    order = np.argsort(arrived, kind="stable")
    offsets = np.concatenate(([0], np.cumsum(np.concatenate(lengths)[order])))
    requests = int(np.searchsorted(offsets, accesses, side="right")) - 1
    order, offsets = order[:requests], offsets[: requests + 1]

    def flat(parts: list[Any]) -> tuple[Any, IntArray]:
        return np.concatenate(parts), np.cumsum([0, *map(len, parts)])[:-1]

    blocks, first_access = flat([trace.blocks for trace in traces])
    all_offsets, first_offset = flat([trace.offsets for trace in traces])
    is_shared, first_block = flat(
        [np.bincount(trace.blocks) * SHARED_BY >= trace.num_requests for trace in traces]
    )
    trace_of = np.array([number for number, _ in copies], dtype=np.int32)
    sizes = np.array([trace.num_blocks for trace in traces])
    plan = _Copies(
        np.concatenate(copy_of)[order],
        np.concatenate(request_of)[order],
        trace_of,
        np.concatenate(([0], np.cumsum(sizes[trace_of])[:-1])),
        np.full(int(sizes[trace_of].sum()), NO_PARENT, dtype=np.int32),
        np.full(len(is_shared), NO_PARENT, dtype=np.int32),
        is_shared,
        first_block,
        first_access,
        first_offset,
        blocks,
        all_offsets,
    )
    day_blocks, parents = (
        np.empty(int(offsets[-1]), dtype=np.int64),
        np.empty(len(plan.names), dtype=np.int64),
    )
    unique = _fill(plan, day_blocks, parents)
    tokens = np.zeros((2, requests), dtype=np.int64)
    for number, trace in enumerate(traces):
        own = trace_of[plan.copy_of] == number
        tokens[:, own] = np.stack((trace.input_tokens, trace.output_tokens))[:, plan.request_of[own]]
    return Trace(
        "a day",
        traces[0].block_tokens,
        day_blocks,
        offsets,
        parents[:unique],
        tokens[0],
        tokens[1],
        arrived[order],
        np.zeros(requests, dtype=np.int8),  # no ends of answers: a policy for conversations ranks agents too
    )


@numba.njit
def _fill(plan: _Copies, day_blocks: IntArray, parents: IntArray) -> int:
    """Numbers the blocks in order of first appearance; returns how many there are."""
    unique = written = 0
    for i in range(len(plan.copy_of)):
        copy = plan.copy_of[i]
        trace = plan.trace_of[copy]
        offset = plan.first_offset[trace] + plan.request_of[i]
        parent = NO_PARENT
        for access in range(plan.offsets[offset], plan.offsets[offset + 1]):
            block = plan.blocks[plan.first_access[trace] + access]
            shared = plan.first_block[trace] + block
            name = (
                plan.shared_names[shared] if plan.is_shared[shared] else plan.names[plan.base[copy] + block]
            )
            if name < 0:
                name = unique
                unique += 1
                parents[name] = parent
                if plan.is_shared[shared]:
                    plan.shared_names[shared] = name
                else:
                    plan.names[plan.base[copy] + block] = name
            day_blocks[written] = name
            written += 1
            parent = name
    return unique


def measure(files: list[Path], accesses: int, policy: str, fraction: float, seed: int) -> dict[str, Any]:
    """One row; runs in a process of its own."""
    start = time.process_time()
    traces = []
    for file in files:
        sessions = detect_reader(file).NAME in FORMATS_OF_SESSIONS
        traces.append(
            read_trace(file, ReadOptions(block_tokens=BLOCK_TOKENS if sessions else None, seed=seed))
        )
    assert len({trace.block_tokens for trace in traces}) == 1, "traces of one block size make a day"
    replay = choose_replay(policy, ReplayMode.TREE)
    replay(make_day(traces[:1], 1000, seed), 10)  # compiles
    day = make_day(traces, accesses, seed)
    del traces
    made, capacity = time.process_time(), max(1, int(fraction * day.num_blocks))
    counts = replay(day, capacity)
    taken = time.process_time() - made
    return {
        "policy": policy,
        "accesses": day.num_accesses,
        "requests": day.num_requests,
        "unique_blocks": day.num_blocks,
        "hours": float(day.seconds[-1]) / 3600,
        "capacity_blocks": capacity,
        "block_hit_rate": counts.hit_blocks / day.num_accesses,
        "making_seconds": made - start,
        "replay_seconds": taken,
        "million_per_second": day.num_accesses / taken / 1e6,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIB,
    }


def main(
    traces: Annotated[
        list[Path], typer.Argument(help="Recorded traces of one block size that the day is made of.")
    ],
    accesses: Annotated[str, typer.Option(help="Comma-separated block accesses of a day.")] = "1e6,1e7,1e8",
    policies: Annotated[str, typer.Option(help="Comma-separated policies.")] = "lru,importance",
    capacity_fraction: Annotated[float, typer.Option(help="Of the day's unique blocks.")] = 0.01,
    seed: Annotated[int, typer.Option(help="Of the tenants' offsets.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file.")] = None,
) -> None:
    """Measures and writes the results after each row."""
    rows: list[dict[str, Any]] = []
    for size in (int(float(text)) for text in accesses.split(",")):
        for policy in policies.split(","):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
                rows.append(alone.submit(measure, traces, size, policy, capacity_fraction, seed).result())
            written = write_results("day", rows, out=out)
    print_rows("A day of traffic", rows)
    typer.echo(f"written to {written}")


if __name__ == "__main__":
    typer.run(main)

"""What importance gains on recorded coding agents when it is told how answers ended, and by which facts.

Sessions of a kv-cache-tester file, some of them alive at a time. Everything in the policy was chosen on even
lines of the file; reported are odd ones, from an empty estimator and the first request on. Hit rates are
deterministic. ``gap`` is the part of the way from LRU to the optimum, with a 95 % interval over the orders in
which sessions begin (Student's t). Arms beside ``importance``:

- ``ends not told``: the same requests without the ends of answers, as before turns;
- ``ends in classes``: the same without turns, the ends are facts of the classes of nodes;
- ``without the end``, ``without rhythm``, ``without length``: turns, one fact of their classes left out;
- ``one class``: turns without any of the three;
- ``ages in requests``: the clock of turns counts admitted requests;
- ``told what is over``: turns, and each turn that nothing will ever go on from is given up at once. No policy
  can know that: it says how much of the gap is a matter of who returns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from intervals import interval
from results import print_rows, write_results
from rich.progress import track

from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance.reuse.turns import NO_RHYTHM, Classify, turn_class
from sgl_importance_lab.replay.compiled.fast_importance import replay_importance
from sgl_importance_lab.replay.compiled.fast_turns import replay_estimated, replay_turns
from sgl_importance_lab.replay.formats.kv_cache_tester import merge_sessions, read_sessions
from sgl_importance_lab.replay.formats.line_reader import refuse_bad_record
from sgl_importance_lab.replay.policy_registry import IMPORTANCE, OPTIMUM
from sgl_importance_lab.replay.replay_runner import ReplayMode, choose_replay, run_jobs
from sgl_importance_lab.replay.sessions import BlockFacts, block_facts
from sgl_importance_lab.replay.trace import NO_PARENT, Trace
from sgl_importance_lab.replay.trace_turns import GONE_ON, TraceTurns

BLOCK_TOKENS = 512
FRACTIONS = (0.01, 0.02, 0.04, 0.08)
ABLATED_ALIVE = 20
PUBLISHED = ("lru",)

WITHOUT_RHYTHM = "without rhythm"
ARMS: dict[str, Classify] = {
    "without the end": lambda end, rhythm, tokens: turn_class(AnswerEnd.UNKNOWN, rhythm, tokens),
    WITHOUT_RHYTHM: lambda end, rhythm, tokens: turn_class(end, NO_RHYTHM, tokens),
    "without length": lambda end, rhythm, tokens: turn_class(end, rhythm, 0),
    "one class": lambda end, rhythm, tokens: turn_class(AnswerEnd.UNKNOWN, NO_RHYTHM, 0),
}
NOT_TOLD, IN_CLASSES, IN_REQUESTS = "ends not told", "ends in classes", "ages in requests"
TOLD_OVER = "told what is over"


@dataclass(frozen=True, slots=True)
class Job:
    """One replay; ``trace`` is an index into the traces of the run."""

    trace: int
    policy: str
    capacity: int


Cell = tuple[int, float, str]
"""Sessions alive at a time, capacity as a part of the unique blocks, arm."""


def hit_rates(
    hits: Callable[[Sequence[Trace], Job], int],
    traces: Sequence[Trace],
    work: Sequence[tuple[Cell, Job]],
    processes: int,
) -> dict[Cell, list[float]]:
    """Runs all jobs; the hit rates of each cell, in the order of its jobs."""
    found = [0] * len(work)
    runs = run_jobs(hits, traces, [job for _, job in work], processes)
    for index, hit in track(runs, total=len(work), description="replaying"):
        found[index] = hit
    rates: dict[Cell, list[float]] = {}
    for (cell, job), hit in zip(work, found, strict=True):
        rates.setdefault(cell, []).append(hit / traces[job.trace].num_accesses)
    return rates


class ToldWhatIsOver(TraceTurns):
    """Gives up at once what nothing will go on from."""

    def __init__(self, trace: Trace, facts: BlockFacts) -> None:
        super().__init__(trace, facts)
        self._is_over = np.ones(trace.num_requests, dtype=np.bool_)
        self._is_over[self.before[self.before != NO_PARENT]] = False

    def begin_request(self, request: int) -> None:
        super().begin_request(request)
        for turn in (request, int(self._departed[request])):
            if turn != NO_PARENT and self._is_over[turn]:
                self.classes[turn] = GONE_ON


def hits(traces: Sequence[Trace], job: Job) -> int:
    """Blocks that one arm hits."""
    trace, capacity = traces[job.trace], job.capacity
    if job.policy == NOT_TOLD:
        return replay_importance(trace, capacity).hit_blocks
    if job.policy == IN_CLASSES:
        return replay_importance(trace, capacity, block_facts(trace, with_ends=True)).hit_blocks
    if job.policy == IN_REQUESTS:
        requests = np.arange(trace.num_requests, dtype=np.float64)
        return replay_turns(replace(trace, seconds=requests), capacity).hit_blocks
    if job.policy == TOLD_OVER:
        facts = block_facts(trace)
        return replay_estimated(trace, capacity, facts, ToldWhatIsOver(trace, facts)).hit_blocks
    if job.policy in ARMS:
        return replay_turns(trace, capacity, block_facts(trace), ARMS[job.policy]).hit_blocks
    return choose_replay(job.policy, ReplayMode.TREE)(trace, capacity).hit_blocks


def main(
    sessions_file: Annotated[Path, typer.Argument(help="claude_code_sessions.jsonl.gz, or a file like it.")],
    seeds: Annotated[int, typer.Option(min=1, max=10, help="Orders in which sessions begin.")] = 5,
    alive_at_a_time: Annotated[
        str, typer.Option("--alive", help="Comma-separated numbers of sessions that are alive at a time.")
    ] = "10,20,40,80",
    lines: Annotated[str, typer.Option(help="odd, even or all lines of the file.")] = "odd",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
    out: Annotated[Path | None, typer.Option(help="JSON file.")] = None,
) -> None:
    """Measures and writes the results."""
    wanted = {"odd": (1,), "even": (0,), "all": (0, 1)}[lines]
    _, sessions = read_sessions(sessions_file, BLOCK_TOKENS, refuse_bad_record)
    sessions = [session for session in sessions if session.line % 2 in wanted]
    traces: list[Trace] = []
    work: list[tuple[Cell, Job]] = []
    for alive in map(int, alive_at_a_time.split(",")):
        for seed in range(seeds):
            trace = merge_sessions(f"{alive} alive", BLOCK_TOKENS, sessions, alive, seed, refuse_bad_record)
            arms = [*PUBLISHED, OPTIMUM, IMPORTANCE, NOT_TOLD, TOLD_OVER]
            arms += [IN_CLASSES, *ARMS, IN_REQUESTS] if alive == ABLATED_ALIVE else [WITHOUT_RHYTHM]
            for fraction in FRACTIONS:
                for arm in arms:
                    job = Job(len(traces), arm, max(1, int(fraction * trace.num_blocks)))
                    work.append(((alive, fraction, arm), job))
            traces.append(trace)
    rates = hit_rates(hits, traces, work, jobs)
    rows: list[dict[str, Any]] = []
    for (alive, fraction, arm), values in rates.items():
        rate = np.array(values)
        lru, optimum = (np.array(rates[alive, fraction, name]) for name in ("lru", OPTIMUM))
        gap, low, high = interval(((rate - lru) / (optimum - lru)).tolist())
        rows.append(
            {
                "alive": alive,
                "capacity": fraction,
                "policy": arm,
                "hit_rate": float(rate.mean()),
                "least_over_lru": float((rate - lru).min()),
                "gap": gap,
                "low": low,
                "high": high,
                "seeds": len(values),
            }
        )
    print_rows(f"Sessions of {lines} lines", rows)
    typer.echo(f"written to {write_results('agents', rows, out=out)}")


if __name__ == "__main__":
    typer.run(main)

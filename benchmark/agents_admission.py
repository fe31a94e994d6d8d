"""Rules of admission, and of whole sessions, on recorded coding agents: what they add to the policy.

    python benchmark/agents_admission.py claude_code_sessions.jsonl.gz

The policy of ``benchmark/agents.py``, with one rule on top of its ranking. Odd lines of the file, from an
empty estimator and the first request on. Arms beside ``importance``:

- ``own text x W``: what the running request has visited counts W times. Below 1 is admission: a long prompt
  has to be worth as many times more as what it displaces. ``own text first`` always keeps it, as a server
  does, which makes room before it runs;
- ``cut goes on``: a session that has lost its tail goes on losing first, until it is back: whole sessions go;
- ``cut is spared``: such a session loses nothing more as long as there is another one.

``gap`` is the part of the way from LRU to the optimum, ``beside_importance`` the difference from the policy
in the same order of sessions; both with 95 % intervals over the orders. Hit rates are deterministic.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from agents import BLOCK_TOKENS, Cell, Job, hit_rates
from intervals import interval
from results import RESULTS, print_rows, rows_so_far, write_results

from sgl_importance.reuse.life_table import FloatArray
from sgl_importance.reuse.turns import NUM_TURN_CLASSES, TurnEstimator
from sgl_importance_lab.replay.cache import replay_tree
from sgl_importance_lab.replay.compiled.fast_turns import replay_estimated
from sgl_importance_lab.replay.formats.kv_cache_tester import merge_sessions, read_sessions
from sgl_importance_lab.replay.formats.line_reader import refuse_bad_record
from sgl_importance_lab.replay.policy_registry import IMPORTANCE, OPTIMUM
from sgl_importance_lab.replay.replay_runner import ReplayMode, choose_replay
from sgl_importance_lab.replay.sessions import BlockFacts, block_facts
from sgl_importance_lab.replay.trace import Trace
from sgl_importance_lab.replay.trace_turns import TraceTurns
from sgl_importance_lab.replay.turn_replay import TurnReplayPolicy

LRU = "lru"
WEIGHTS = {
    "own text x 0.2": 0.2,
    "own text x 0.5": 0.5,
    "own text x 2": 2.0,
    "own text first": 1e30,
}
CUT_FACTORS = {"cut goes on": 0.0, "cut is spared": 1e30}
ARMS = (LRU, OPTIMUM, IMPORTANCE, *WEIGHTS, *CUT_FACTORS)


class WeightedEstimator(TurnEstimator):
    """Has every class twice; the second time it is worth ``weight`` times as much."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        super().__init__()

    @property
    def index(self) -> FloatArray:
        index = super().index
        return np.concatenate((index, self._weight * index))


class WeightedTurns(TraceTurns):
    """Turns of which the running request's counts ``weight`` times."""

    def __init__(self, trace: Trace, facts: BlockFacts, weight: float) -> None:
        super().__init__(trace, facts)
        self.estimator = WeightedEstimator(weight)

    def begin_request(self, request: int) -> None:
        if request:
            self.classes[request - 1] -= NUM_TURN_CLASSES
        super().begin_request(request)
        self.classes[request] += NUM_TURN_CLASSES


class CutSessions(TurnReplayPolicy):
    """A turn that lost a block counts ``factor`` times until a request visits it."""

    def __init__(self, capacity: int, trace: Trace, facts: BlockFacts, factor: float) -> None:
        super().__init__(capacity, trace, facts=facts)
        self._factor = factor
        self._cut: set[int] = set()

    def loss(self, block: int) -> float:
        loss = super().loss(block)
        is_cut = block not in self._shared and self._visited_by[block] in self._cut
        return loss * self._factor if is_cut else loss

    def victim(self) -> int:
        block = super().victim()
        self._cut.add(self._visited_by[block])
        return block


def hits(traces: Sequence[Trace], job: Job) -> int:
    """Blocks that one arm hits."""
    trace, facts = traces[job.trace], block_facts(traces[job.trace])
    if job.policy in WEIGHTS:
        turns = WeightedTurns(trace, facts, WEIGHTS[job.policy])
        return replay_estimated(trace, job.capacity, facts, turns).hit_blocks
    if job.policy in CUT_FACTORS:
        policy = CutSessions(job.capacity, trace, facts, CUT_FACTORS[job.policy])
        return replay_tree(trace, policy).hit_blocks
    return choose_replay(job.policy, ReplayMode.TREE)(trace, job.capacity).hit_blocks


def main(
    sessions_file: Annotated[Path, typer.Argument(help="claude_code_sessions.jsonl.gz, or a file like it.")],
    seeds: Annotated[int, typer.Option(min=1, max=10, help="Orders in which sessions begin.")] = 5,
    alive_at_a_time: Annotated[
        str, typer.Option("--alive", help="Comma-separated numbers of sessions that are alive at a time.")
    ] = "20,80",
    capacities: Annotated[
        str, typer.Option(help="Comma-separated parts of the unique blocks.")
    ] = "0.01,0.02",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
    resume: Annotated[bool, typer.Option(help="Leave out what the JSON has.")] = False,
    out: Annotated[Path, typer.Option(help="JSON file.")] = RESULTS / "agents_admission.json",
) -> None:
    """Measures and writes the results."""
    _, sessions = read_sessions(sessions_file, BLOCK_TOKENS, refuse_bad_record)
    sessions = [session for session in sessions if session.line % 2]
    rows = rows_so_far(out) if resume else []
    known = {(row["alive"], row["capacity"]) for row in rows}
    traces: list[Trace] = []
    work: list[tuple[Cell, Job]] = []
    for alive in map(int, alive_at_a_time.split(",")):
        for seed in range(seeds):
            trace = merge_sessions(f"{alive} alive", BLOCK_TOKENS, sessions, alive, seed, refuse_bad_record)
            for fraction in map(float, capacities.split(",")):
                for arm in () if (alive, fraction) in known else ARMS:
                    job = Job(len(traces), arm, max(1, int(fraction * trace.num_blocks)))
                    work.append(((alive, fraction, arm), job))
            traces.append(trace)
    rates = {cell: np.array(values) for cell, values in hit_rates(hits, traces, work, jobs).items()}
    for (alive, fraction, arm), rate in rates.items():
        lru, optimum, policy = (rates[alive, fraction, name] for name in (LRU, OPTIMUM, IMPORTANCE))
        gap, low, high = interval(((rate - lru) / (optimum - lru)).tolist())
        beside = interval(((rate - policy) / (optimum - lru)).tolist())
        rows.append(
            {
                "alive": alive,
                "capacity": fraction,
                "policy": arm,
                "hit_rate": float(rate.mean()),
                "gap": gap,
                "low": low,
                "high": high,
                "beside_importance": beside[0],
                "beside_low": beside[1],
                "beside_high": beside[2],
                "seeds": len(rate),
            }
        )
    print_rows("Sessions of odd lines", rows)
    typer.echo(f"written to {write_results('agents_admission', rows, out=out)}")


if __name__ == "__main__":
    typer.run(main)

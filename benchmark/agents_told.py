"""What it is worth that sessions say when they are over, on recorded coding agents.

Sessions of a kv-cache-tester file, ten of them alive at a time. A share of them, chosen by chance, closes
itself right behind its last answer, as ``POST /close_session`` does: all that the session alone had asked for
is given back first, and its turns are censored. The others say nothing. Reported are odd lines of the file,
from an empty estimator on; ``gap`` is the part of the way from LRU to the optimum, with a 95 % interval over
the orders in which sessions begin (Student's t). ``benchmark/agents.py`` has what was taken for the ceiling:
there each turn that nothing goes on from is given up at once, those of sub-agents too, which end before their
session does, and what sessions parted behind is kept.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from intervals import interval
from results import print_rows, write_results
from rich.progress import track

from sgl_importance_lab.replay.compiled.fast_turns import replay_estimated
from sgl_importance_lab.replay.formats.kv_cache_tester import Session, in_order, merge_sessions, read_sessions
from sgl_importance_lab.replay.formats.line_reader import refuse_bad_record
from sgl_importance_lab.replay.policy_registry import OPTIMUM
from sgl_importance_lab.replay.replay_runner import ReplayMode, choose_replay
from sgl_importance_lab.replay.sessions import BlockFacts, block_facts
from sgl_importance_lab.replay.trace import IntArray, Trace
from sgl_importance_lab.replay.trace_turns import TraceTurns

BLOCK_TOKENS = 512
FRACTIONS = (0.01, 0.02, 0.04, 0.08)
SHARES = (0.0, 0.25, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Order:
    """All sessions in one order.

    Attributes:
        trace: their requests.
        session_of: number of each request's session; int64 [requests].
        chance: of each session, uniform in [0, 1): below the share it says that it is over; float64
            [sessions].
    """

    trace: Trace
    session_of: IntArray
    chance: np.ndarray

    @classmethod
    def of(cls, sessions: Sequence[Session], alive: int, seed: int) -> Order:
        trace = merge_sessions(f"{alive} alive", BLOCK_TOKENS, sessions, alive, seed, refuse_bad_record)
        numbers = np.array([number for _, number, _ in in_order(sessions, alive, seed)], dtype=np.int64)
        assert len(numbers) == trace.num_requests
        rng = random.Random(seed)
        return cls(trace, numbers, np.array([rng.random() for _ in sessions]))


class ToldTurns(TraceTurns):
    """Hears from a share of the sessions, behind their last request, that they are over."""

    def __init__(self, order: Order, facts: BlockFacts, share: float) -> None:
        super().__init__(order.trace, facts)
        self._requests_of_last: dict[int, IntArray] = {}
        for number in np.flatnonzero(order.chance < share):
            requests = np.flatnonzero(order.session_of == number)
            self._requests_of_last[int(requests[-1])] = requests

    def begin_request(self, request: int) -> None:
        super().begin_request(request)
        ended = self._requests_of_last.get(request)
        if ended is not None:
            self.over(ended)


def main(
    sessions_file: Annotated[Path, typer.Argument(help="claude_code_sessions.jsonl.gz, or a file like it.")],
    seeds: Annotated[int, typer.Option(min=1, max=10, help="Orders in which sessions begin.")] = 5,
    alive: Annotated[int, typer.Option(min=1, help="Sessions alive at a time.")] = 10,
    out: Annotated[Path | None, typer.Option(help="JSON file.")] = None,
) -> None:
    """Measures and writes the results."""
    _, sessions = read_sessions(sessions_file, BLOCK_TOKENS, refuse_bad_record)
    sessions = [session for session in sessions if session.line % 2 == 1]
    lru = choose_replay("lru", ReplayMode.TREE)
    optimum = choose_replay(OPTIMUM, ReplayMode.TREE)
    rates: dict[tuple[float, float], list[float]] = {}
    gaps: dict[tuple[float, float], list[float]] = {}
    for seed in track(range(seeds), description="orders"):
        order = Order.of(sessions, alive, seed)
        trace, facts = order.trace, block_facts(order.trace)
        for fraction in FRACTIONS:
            capacity = max(1, int(fraction * trace.num_blocks))
            low, high = (replay(trace, capacity).hit_blocks for replay in (lru, optimum))
            for share in SHARES:
                hits = replay_estimated(trace, capacity, facts, ToldTurns(order, facts, share)).hit_blocks
                rates.setdefault((fraction, share), []).append(hits / trace.num_accesses)
                gaps.setdefault((fraction, share), []).append((hits - low) / (high - low))
    rows: list[dict[str, Any]] = []
    for (fraction, share), values in rates.items():
        gap, low_end, high_end = interval(gaps[fraction, share])
        rows.append(
            {
                "alive": alive,
                "capacity": fraction,
                "share_told": share,
                "hit_rate": float(np.mean(values)),
                "gap": gap,
                "low": low_end,
                "high": high_end,
                "seeds": seeds,
            }
        )
    print_rows("Sessions that say when they are over", rows)
    typer.echo(f"written to {write_results('agents_told', rows, out=out)}")


if __name__ == "__main__":
    typer.run(main)

"""Every policy that the replay knows, on four kinds of traffic that nothing was chosen on, and on Mooncake.

    python benchmark/published.py claude_code_sessions.jsonl.gz mooncake_conversation.jsonl agents --resume

- ``agents``: odd lines of recorded coding agents, twenty sessions alive, orders of sessions as
  ``benchmark/agents.py`` has them;
- ``agents untold``: the same, where nobody tells how answers end;
- ``mooncake``: an hour of Mooncake's conversations. Turns were chosen on agents only; the classes of nodes
  were chosen on its first half and on the whole of it, and random windows were looked at
  (docs/evidence/eviction.md);
- ``miniswe``, ``taubench``: sessions of agents that take random turns (``benchmark/policy.py``);
- ``cycle``: forty sessions that ask one after the other, always in the same order, and grow by a block each
  time: LRU's worst case where they do not fit. It is made up, and no choice was made on it.

A row is a trace, a size of the cache and a policy; its lists have a value for each order of sessions. Hit
rates are deterministic. ``lru_blocks`` is what LRU would need to hit as much, from its exact curve. The file
is written after each replay; with ``--resume`` what it has is not replayed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from agents import BLOCK_TOKENS
from agents import FRACTIONS as AGENT_FRACTIONS
from policy import FRACTIONS, interleaved_sessions
from results import RESULTS, print_rows, rows_so_far, write_results
from rich.progress import Progress

from sgl_importance_lab.replay.equivalent import lru_curve
from sgl_importance_lab.replay.formats.detect import read_trace
from sgl_importance_lab.replay.formats.kv_cache_tester import Session, merge_sessions, read_sessions
from sgl_importance_lab.replay.formats.line_reader import refuse_bad_record
from sgl_importance_lab.replay.policy_registry import POLICY_NAMES
from sgl_importance_lab.replay.replay_runner import Job, run_job, run_jobs
from sgl_importance_lab.replay.trace import Trace, TraceBuilder

Row = dict[str, Any]
AGENTS = "agents"
UNTOLD = "agents untold"
ALIVE = 20
CYCLE_FRACTIONS = (0.1, 0.2, 0.4, 0.6)
SHORT_ORDERS = 5
"""Of the short sessions, the first of them those of ``benchmark/policy.py``."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """A trace in several orders, which are made when they are asked for."""

    name: str
    orders: int
    fractions: tuple[float, ...]
    order: Callable[[int], Trace]


def cycle(_: int) -> Trace:
    builder = TraceBuilder("cycle", BLOCK_TOKENS)
    for turn in range(60):
        for session in range(40):
            blocks = [(session, block) for block in range(41 + turn)]
            seconds = 10.0 * (40 * turn + session)
            builder.add(blocks, input_tokens=BLOCK_TOKENS * len(blocks), output_tokens=100, seconds=seconds)
    return builder.build()


def traffic(sessions_file: Path, mooncake: Path, folder: Path, orders: int) -> Iterator[Traffic]:
    yield Traffic("cycle", 1, CYCLE_FRACTIONS, cycle)
    yield Traffic("mooncake", 1, FRACTIONS, lambda _: read_trace(mooncake))
    for kind in ("miniswe", "taubench"):
        yield Traffic(kind, SHORT_ORDERS, FRACTIONS, partial(interleaved_sessions, folder / kind, kind))

    @cache
    def sessions() -> list[Session]:
        _, every = read_sessions(sessions_file, BLOCK_TOKENS, refuse_bad_record)
        return [session for session in every if session.line % 2]

    def merged(seed: int) -> Trace:
        return merge_sessions(AGENTS, BLOCK_TOKENS, sessions(), ALIVE, seed, refuse_bad_record)

    def untold(seed: int) -> Trace:
        trace = merged(seed)
        return replace(trace, answer_ends=np.zeros_like(trace.answer_ends))

    yield Traffic(AGENTS, orders, AGENT_FRACTIONS, merged)
    yield Traffic(UNTOLD, orders, AGENT_FRACTIONS, untold)


class Rows:
    """The rows of the file; each grows by a value per order."""

    LISTS = ("capacity_blocks", "hit_rates", "token_hit_rates", "lru_blocks")

    def __init__(self, path: Path, resume: bool) -> None:
        self._path = path
        known = rows_so_far(path) if resume else []
        self._rows = {self._key(row): row for row in known}

    @staticmethod
    def _key(row: Row) -> tuple[str, float, str]:
        return row["trace"], row["capacity"], row["policy"]

    def orders(self, trace: str, capacity: float, policy: str) -> int:
        """How many orders have been replayed."""
        row = self._rows.get((trace, capacity, policy))
        return len(row["hit_rates"]) if row else 0

    def add(self, trace: str, capacity: float, policy: str, **values: float | None) -> None:
        key = trace, capacity, policy
        new: Row = {"trace": trace, "capacity": capacity, "policy": policy} | {
            name: [] for name in self.LISTS
        }
        row = self._rows.setdefault(key, new)
        for name in self.LISTS:
            row[name].append(values[name])
        write_results("published", self.sorted(), out=self._path)

    def sorted(self) -> list[Row]:
        names = list(POLICY_NAMES)
        return sorted(
            self._rows.values(), key=lambda row: (row["trace"], names.index(row["policy"]), row["capacity"])
        )


def replay_order(
    kind: Traffic, order: int, policies: Sequence[str], rows: Rows, jobs: int, progress: Progress
) -> None:
    """Replays what the rows lack of one order of a trace."""
    missing = [
        (policy, fraction)
        for policy in policies
        for fraction in kind.fractions
        if rows.orders(kind.name, fraction, policy) == order
    ]
    if not missing:
        return
    trace = replace(kind.order(order), name=kind.name)
    curve = lru_curve(trace)
    work = [
        Job(0, policy, max(1, int(fraction * trace.num_blocks)), seed=order) for policy, fraction in missing
    ]
    bar = progress.add_task(f"{kind.name}, order {order}", total=len(work))
    for index, row in run_jobs(run_job, [trace], work, jobs):
        policy, fraction = missing[index]
        rows.add(
            kind.name,
            fraction,
            policy,
            capacity_blocks=row.capacity_blocks,
            hit_rates=round(row.block_hit_rate, 6),
            token_hit_rates=round(row.token_hit_rate, 6),
            lru_blocks=curve.capacity_for(row.hit_blocks),
        )
        progress.advance(bar)


def main(
    sessions_file: Annotated[Path, typer.Argument(help="claude_code_sessions.jsonl.gz, or a file like it.")],
    mooncake: Annotated[Path, typer.Argument(help="mooncake_conversation.jsonl.")],
    folder: Annotated[Path, typer.Argument(help="Folder with the folders miniswe and taubench.")],
    orders: Annotated[int, typer.Option(min=1, help="Orders of the coding agents' sessions.")] = 5,
    policies: Annotated[str, typer.Option(help="Comma-separated; all if absent.")] = "",
    names: Annotated[
        str, typer.Option("--traffic", help="Comma-separated names of traces; all if absent.")
    ] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    resume: Annotated[bool, typer.Option(help="Leave out what the JSON has.")] = False,
    out: Annotated[Path, typer.Option(help="JSON file.")] = RESULTS / "published.json",
) -> None:
    """Measures and writes the results."""
    rows = Rows(out, resume)
    chosen = list(dict.fromkeys(policies.split(","))) if policies else POLICY_NAMES
    kinds = [
        kind
        for kind in traffic(sessions_file, mooncake, folder, orders)
        if not names or kind.name in names.split(",")
    ]
    with Progress() as progress:
        for order in range(max(kind.orders for kind in kinds)):
            for kind in kinds:
                if order < kind.orders:
                    replay_order(kind, order, chosen, rows, jobs, progress)
    print_rows("Every policy", [{**row, "hit_rates": str(row["hit_rates"])} for row in rows.sorted()])
    typer.echo(f"written to {out}")


if __name__ == "__main__":
    typer.run(main)

"""What a restart costs recorded coding agents when the ledger keeps nothing of turns.

    python benchmark/agents_restart.py claude_code_sessions.jsonl.gz

Shadow caches as in ``benchmark/agents_served.py``: the server's own policy and facts on whole nodes, answers
at once. In the middle of the requests the server restarts. The pool is empty then; the ledger knows the nodes
that were there and the life tables of their classes. Arms, beside ``lru``:

- ``no turns kept``: turns are learnt anew, as it is served;
- ``tables kept``: the life tables of turns go on, single turns are forgotten;
- ``all kept``: single turns, too, so that a session that comes back is known by its rhythm.

``hour`` is the hit rate of the requests that come in the hour behind the restart, ``rest`` of all behind it.
``more`` and ``rest_more`` say how much higher they are than without turns kept, with 95 % intervals over the
orders in which sessions begin (Student's t). Hit rates are deterministic.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from agents import BLOCK_TOKENS, FRACTIONS, Job
from agents_served import LONGEST_TOKENS, LRU, sessions_that_fit
from intervals import interval
from restarted import ALL, NO_TURNS, TABLES, RestartedRanking, restart
from results import RESULTS, print_rows, rows_so_far, write_results
from rich.progress import track

from sgl_importance.nodes.ghosts import ghost_pages_of
from sgl_importance.observe.shadow.shadow_cache import ShadowCache
from sgl_importance.observe.shadow.shadow_pair import SERVER_CHUNK_TOKENS
from sgl_importance.observe.shadow.shadow_ranking import LruShadowRanking
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance_lab.replay.formats.kv_cache_tester import merge_sessions
from sgl_importance_lab.replay.formats.line_reader import refuse_bad_record
from sgl_importance_lab.replay.importance_replay import UNIFORM_COST
from sgl_importance_lab.replay.replay_runner import run_jobs
from sgl_importance_lab.replay.served_nodes import ServedPages
from sgl_importance_lab.replay.trace import Trace

ARMS = (LRU, NO_TURNS, TABLES, ALL)
HOUR = 3600.0


def requests_in_hour(trace: Trace) -> int:
    """How many come in the hour behind the request in the middle, itself included."""
    middle = trace.num_requests // 2
    return int((trace.seconds[middle:] < trace.seconds[middle] + HOUR).sum())


def rates(traces: Sequence[Trace], job: Job) -> tuple[float, float]:
    """Hit rates of the hour behind the restart, and of all behind it."""
    trace = traces[job.trace]
    ranking = (
        LruShadowRanking()
        if job.policy == LRU
        else RestartedRanking(UNIFORM_COST, BLOCK_TOKENS, ghost_pages_of(job.capacity))
    )
    cache = ShadowCache(job.capacity, BLOCK_TOKENS, ranking, spare_pages=1, chunk_tokens=SERVER_CHUNK_TOKENS)
    served = ServedPages(trace)
    middle = trace.num_requests // 2
    found, asked = np.zeros((2, trace.num_requests), dtype=np.int64)
    for request in range(trace.num_requests):
        if request == middle:
            restart(cache, job.policy)
        pages = served.prompt(request)
        if not pages:
            continue
        asked[request] = len(pages)
        found[request] = (
            cache.admit(str(request), pages, int(trace.input_tokens[request])) or 0
        ) // BLOCK_TOKENS
        end = AnswerEnd(int(trace.answer_ends[request]))
        cache.finish(str(request), served.with_answer(request), served.tokens(request), end)
    behind = slice(middle, None), slice(middle, middle + requests_in_hour(trace))
    rest, hour = (found[chosen].sum() / asked[chosen].sum() for chosen in behind)
    return float(hour), float(rest)


def main(
    sessions_file: Annotated[Path, typer.Argument(help="claude_code_sessions.jsonl.gz, or a file like it.")],
    seeds: Annotated[int, typer.Option(min=1, max=10, help="Orders in which sessions begin.")] = 5,
    alive: Annotated[int, typer.Option(min=1, help="Sessions that are alive at a time.")] = 20,
    lines: Annotated[str, typer.Option(help="odd, even or all lines of the file.")] = "odd",
    capacities: Annotated[str, typer.Option(help="Comma-separated parts of the unique blocks.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
    resume: Annotated[bool, typer.Option(help="Leave out the sizes that the JSON has.")] = False,
    out: Annotated[Path, typer.Option(help="JSON file.")] = RESULTS / "agents_restart.json",
) -> None:
    """Measures and writes the results."""
    sessions = sessions_that_fit(sessions_file, lines)
    traces = [
        merge_sessions(f"{alive} alive", BLOCK_TOKENS, sessions, alive, seed, refuse_bad_record)
        for seed in range(seeds)
    ]
    rows = rows_so_far(out) if resume else []
    known = {row["capacity"] for row in rows}
    fractions = [float(each) for each in capacities.split(",")] if capacities else FRACTIONS
    work: list[tuple[tuple[float, str], Job]] = []
    for index, trace in enumerate(traces):
        for fraction in sorted(set(fractions) - known):
            capacity = max(-(-LONGEST_TOKENS // BLOCK_TOKENS) + 2, int(fraction * trace.num_blocks))
            work += [((fraction, arm), Job(index, arm, capacity)) for arm in ARMS]
    found: list[tuple[float, float]] = [(0.0, 0.0)] * len(work)
    runs = run_jobs(rates, traces, [job for _, job in work], jobs)
    for index, values in track(runs, total=len(work), description="restarting"):
        found[index] = values
    by_cell: dict[tuple[float, str], list[tuple[float, float]]] = {}
    for (cell, _), values in zip(work, found, strict=True):
        by_cell.setdefault(cell, []).append(values)
    for (fraction, arm), each in by_cell.items():
        values, without = np.array(each), np.array(by_cell[fraction, NO_TURNS])
        hour, rest = (interval(more.tolist()) for more in (values - without).T)
        rows.append(
            {
                "alive": alive,
                "capacity": fraction,
                "policy": arm,
                "hour": float(values[:, 0].mean()),
                "more": hour[0],
                "low": hour[1],
                "high": hour[2],
                "rest": float(values[:, 1].mean()),
                "rest_more": rest[0],
                "rest_low": rest[1],
                "rest_high": rest[2],
                "requests_in_hour": float(np.mean(list(map(requests_in_hour, traces)))),
                "seeds": len(each),
            }
        )
    print_rows(f"Sessions of {lines} lines, a restart in the middle", rows)
    typer.echo(f"written to {write_results('agents_restart', rows, out=out)}")


if __name__ == "__main__":
    typer.run(main)

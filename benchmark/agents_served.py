"""What turns are worth where whole nodes are cached, as on a server, on recorded coding agents.

The requests of a kv-cache-tester file go through shadow caches: the server's own policy object and facts, on
whole nodes, with what a tree and its ghosts can know. Odd lines of the file, without sessions of which a
prompt is longer than the smallest pool. Arms beside ``lru``:

- ``ends not told``: no end of an answer is known;
- ``ends in classes``: the ends are facts of the classes of nodes, and there are no turns;
- ``importance``: turns.

Hit rates are deterministic. ``uncached`` is the ratio of computed prompt blocks to those of LRU: mean over
the orders in which sessions begin, with a 95 % interval (Student's t).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from agents import BLOCK_TOKENS, FRACTIONS, IN_CLASSES, NOT_TOLD, Cell, Job, hit_rates
from intervals import interval
from results import print_rows, write_results

from sgl_importance.replay.formats.kv_cache_tester import merge_sessions, read_sessions
from sgl_importance.replay.formats.line_reader import refuse_bad_record
from sgl_importance.replay.importance_replay import UNIFORM_COST
from sgl_importance.replay.policy_registry import IMPORTANCE
from sgl_importance.replay.trace import Trace
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance.shadow.shadow_cache import ShadowCache
from sgl_importance.shadow.shadow_node import ShadowNode
from sgl_importance.shadow.shadow_ranking import Answer, ImportanceRanking, LruRanking, Ranking

LRU = "lru"
ARMS = (LRU, NOT_TOLD, IN_CLASSES, IMPORTANCE)
LONGEST_TOKENS = 200_000
GHOST_FACTOR = 4  # pages remembered for each page of the pool, as on a server


class EndsInClasses(ImportanceRanking):
    """Without turns."""

    def answered(self, path: Sequence[ShadowNode], answer: Answer) -> None:
        self._tracker.answered([self._known(node) for node in path], answer.end)


def ranking_of(arm: str, capacity: int) -> Ranking:
    if arm == LRU:
        return LruRanking()
    kind = EndsInClasses if arm == IN_CLASSES else ImportanceRanking
    return kind(UNIFORM_COST, BLOCK_TOKENS, GHOST_FACTOR * capacity)


def hits(traces: Sequence[Trace], job: Job) -> int:
    """Prompt blocks that one arm finds; requests are answered one after the other."""
    trace = traces[job.trace]
    cache = ShadowCache(job.capacity, BLOCK_TOKENS, ranking_of(job.policy, job.capacity))
    found = 0
    for request in range(trace.num_requests):
        pages = [int(block).to_bytes(8, "big") for block in trace.request(request)]
        if not pages:
            continue
        prompt_tokens = len(pages) * BLOCK_TOKENS + 1  # so that the last whole block can be a hit
        found += cache.admit(str(request), pages, prompt_tokens) // BLOCK_TOKENS
        end = AnswerEnd.UNKNOWN if job.policy == NOT_TOLD else AnswerEnd(int(trace.answer_ends[request]))
        tokens = prompt_tokens + int(trace.output_tokens[request])
        cache.finish(str(request), pages, tokens, end)
    return found


def main(
    sessions_file: Annotated[Path, typer.Argument(help="claude_code_sessions.jsonl.gz, or a file like it.")],
    seeds: Annotated[int, typer.Option(min=1, max=10, help="Orders in which sessions begin.")] = 5,
    alive_at_a_time: Annotated[
        str, typer.Option("--alive", help="Comma-separated numbers of sessions that are alive at a time.")
    ] = "20",
    lines: Annotated[str, typer.Option(help="odd, even or all lines of the file.")] = "odd",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
    out: Annotated[Path | None, typer.Option(help="JSON file.")] = None,
) -> None:
    """Measures and writes the results."""
    wanted = {"odd": (1,), "even": (0,), "all": (0, 1)}[lines]
    _, sessions = read_sessions(sessions_file, BLOCK_TOKENS, refuse_bad_record)
    sessions = [
        session
        for session in sessions
        if session.line % 2 in wanted
        and max(request.input_tokens for request in session.requests) <= LONGEST_TOKENS
    ]
    traces: list[Trace] = []
    work: list[tuple[Cell, Job]] = []
    for alive in map(int, alive_at_a_time.split(",")):
        for seed in range(seeds):
            trace = merge_sessions(f"{alive} alive", BLOCK_TOKENS, sessions, alive, seed, refuse_bad_record)
            for fraction in FRACTIONS:
                capacity = max(-(-LONGEST_TOKENS // BLOCK_TOKENS) + 2, int(fraction * trace.num_blocks))
                for arm in ARMS:
                    work.append(((alive, fraction, arm), Job(len(traces), arm, capacity)))
            traces.append(trace)
    rates = hit_rates(hits, traces, work, jobs)
    rows: list[dict[str, Any]] = []
    for (alive, fraction, arm), values in rates.items():
        rate, lru = np.array(values), np.array(rates[alive, fraction, LRU])
        uncached, low, high = interval(((1 - rate) / (1 - lru)).tolist())
        rows.append(
            {
                "alive": alive,
                "capacity": fraction,
                "policy": arm,
                "hit_rate": float(rate.mean()),
                "least_over_lru": float((rate - lru).min()),
                "uncached": uncached,
                "low": low,
                "high": high,
                "seeds": len(values),
            }
        )
    print_rows(f"Sessions of {lines} lines", rows)
    typer.echo(f"written to {write_results('agents_served', rows, out=out)}")


if __name__ == "__main__":
    typer.run(main)

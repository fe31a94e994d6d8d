"""What turns are worth where whole nodes are cached, as on a server, on recorded coding agents.

The requests of a kv-cache-tester file go through shadow caches: the server's own policy object and facts, on
whole nodes, with what a tree and its ghosts can know. Odd lines of the file, without sessions of which a
prompt is longer than the smallest pool. Arms beside ``lru``:

- ``vllm``: vLLM's order, which gives up single pages from the ends of texts; where answers take no time;
- ``ends not told``: no end of an answer is known;
- ``ends in classes``: the ends are facts of the classes of nodes, and there are no turns;
- ``importance``: turns.

Each arm twice: every request is over before the next one comes (``tokens_per_second`` is null in the JSON),
and answers take time: ``START_SECONDS`` and their tokens at ``--tokens-per-second``. That speed is an
assumption, the file records none that a server of ours would have. Then requests run beside each other and
hold what they use, others are admitted before an answer has ended and is known to have, and requests still
come when they came. Prompts are inserted by prefill chunks, answers when they end.

Hit rates are deterministic. ``uncached`` is the ratio of computed prompt blocks to those of LRU: mean over
the orders in which sessions begin, with a 95 % interval (Student's t); ``beside_vllm`` to those of vLLM.
``running`` is the mean number of requests that an admission finds running, and ``held`` the different pages
of the prompts of these and of the one admitted, as a mean share of the pool.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from agents import BLOCK_TOKENS, FRACTIONS, IN_CLASSES, NOT_TOLD, Cell, Job, hit_rates
from intervals import interval
from results import print_rows, write_results

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmark.peers.vllm_blocks import VllmBlocks
from sgl_importance.nodes.ghosts import ghost_pages_of
from sgl_importance.observe.shadow.shadow_cache import ShadowCache
from sgl_importance.observe.shadow.shadow_node import ShadowNode
from sgl_importance.observe.shadow.shadow_pair import SERVER_CHUNK_TOKENS
from sgl_importance.observe.shadow.shadow_ranking import (
    Answer,
    ImportanceRanking,
    LruShadowRanking,
    ShadowRanking,
)
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance_lab.replay.formats.kv_cache_tester import Session, merge_sessions, read_sessions
from sgl_importance_lab.replay.formats.line_reader import refuse_bad_record
from sgl_importance_lab.replay.importance_replay import UNIFORM_COST
from sgl_importance_lab.replay.policy_registry import IMPORTANCE
from sgl_importance_lab.replay.served_nodes import ServedPages
from sgl_importance_lab.replay.trace import Trace

LRU = "lru"
VLLM = "vllm"
ARMS = (LRU, NOT_TOLD, IN_CLASSES, IMPORTANCE)
LONGEST_TOKENS = 200_000
START_SECONDS = 0.5
"""Before the first token of an answer that takes time; assumed, like its speed."""


class EndsInClasses(ImportanceRanking):
    """Without turns."""

    def answered(self, path: Sequence[ShadowNode], answer: Answer) -> None:
        self._tracker.answered([self._known(node) for node in path], answer.end)


def ranking_of(arm: str, capacity: int) -> ShadowRanking:
    if arm == LRU:
        return LruShadowRanking()
    kind = EndsInClasses if arm == IN_CLASSES else ImportanceRanking
    return kind(UNIFORM_COST, BLOCK_TOKENS, ghost_pages_of(capacity))


def events(trace: Trace, tokens_per_second: float | None) -> Iterator[tuple[int, bool]]:
    """Requests with a prompt as they begin (False) and end (True), in order of time.

    Args:
        trace: in order of time.
        tokens_per_second: of answers; None where each is over before the next request comes.
    """
    running: list[tuple[float, int]] = []  # when it ends, request
    for request in range(trace.num_requests):
        if trace.offsets[request] == trace.offsets[request + 1]:
            continue
        now = float(trace.seconds[request])
        while running and running[0][0] <= now:
            yield heappop(running)[1], True
        yield request, False
        if tokens_per_second is None:
            yield request, True
        else:
            lasts = START_SECONDS + int(trace.output_tokens[request]) / tokens_per_second
            heappush(running, (now + lasts, request))
    while running:
        yield heappop(running)[1], True


def load(trace: Trace, tokens_per_second: float | None) -> tuple[float, float]:
    """Means over admissions: requests that run, and different pages of their prompts and the new one's."""
    holders = np.zeros(trace.num_blocks, dtype=np.int64)
    running = pages = 0
    found: list[tuple[int, int]] = []
    for request, is_end in events(trace, tokens_per_second):
        blocks = np.unique(trace.request(request))
        if is_end:
            holders[blocks] -= 1
            pages -= int((holders[blocks] == 0).sum())
            running -= 1
        else:
            pages += int((holders[blocks] == 0).sum())
            holders[blocks] += 1
            found.append((running, pages))
            running += 1
    mean_running, mean_pages = np.mean(found, axis=0)
    return float(mean_running), float(mean_pages)


def hits(traces: Sequence[Trace], job: Job, tokens_per_second: float | None = None) -> int:
    """Prompt blocks that one arm finds."""
    trace = traces[job.trace]
    if job.policy == VLLM:
        return vllm_hits(trace, job.capacity)
    cache = ShadowCache(
        job.capacity,
        BLOCK_TOKENS,
        ranking_of(job.policy, job.capacity),
        spare_pages=1,
        chunk_tokens=SERVER_CHUNK_TOKENS,
    )
    served = ServedPages(trace)
    found = 0
    for request, is_end in events(trace, tokens_per_second):
        if is_end:
            end = AnswerEnd.UNKNOWN if job.policy == NOT_TOLD else AnswerEnd(int(trace.answer_ends[request]))
            cache.finish(str(request), served.with_answer(request), served.tokens(request), end)
        else:
            prompt_tokens = int(trace.input_tokens[request])
            found += (cache.admit(str(request), served.prompt(request), prompt_tokens) or 0) // BLOCK_TOKENS
    return found


def vllm_hits(trace: Trace, capacity: int) -> int:
    """Prompt blocks that vLLM finds where each request is over before the next one comes."""
    blocks, served, found = VllmBlocks(capacity, BLOCK_TOKENS), ServedPages(trace), 0
    for request, is_end in events(trace, None):
        if not is_end:
            prompt, answer = int(trace.input_tokens[request]), int(trace.output_tokens[request])
            found += prompt - blocks.computed(served.with_answer(request), prompt, answer)
    return found // BLOCK_TOKENS


def rows_of(
    traces: Sequence[Trace], work: Sequence[tuple[Cell, Job]], tokens_per_second: float | None, jobs: int
) -> list[dict[str, Any]]:
    """Runs all jobs; a row for each cell."""
    rates = hit_rates(partial(hits, tokens_per_second=tokens_per_second), traces, work, jobs)
    loads = [load(trace, tokens_per_second) for trace in traces]
    rows = []
    for cell, values in rates.items():
        alive, fraction, arm = cell
        rate, lru = np.array(values), np.array(rates[alive, fraction, LRU])
        uncached, low, high = interval(((1 - rate) / (1 - lru)).tolist())
        beside = rates.get((alive, fraction, VLLM))
        beside_vllm = interval(((1 - rate) / (1 - np.array(beside))).tolist()) if beside else None
        of_cell = [(*loads[job.trace], job.capacity) for each, job in work if each == cell]
        rows.append(
            {
                "alive": alive,
                "tokens_per_second": tokens_per_second,
                "capacity": fraction,
                "policy": arm,
                "hit_rate": float(rate.mean()),
                "least_over_lru": float((rate - lru).min()),
                "uncached": uncached,
                "low": low,
                "high": high,
                "beside_vllm": beside_vllm,
                "running": float(np.mean([running for running, _, _ in of_cell])),
                "held": float(np.mean([pages / capacity for _, pages, capacity in of_cell])),
                "pages": float(np.mean([capacity for *_, capacity in of_cell])),
                "seeds": len(values),
            }
        )
    return rows


def sessions_that_fit(sessions_file: Path, lines: str) -> list[Session]:
    """Recorded sessions without prompts that the smallest pool cannot hold.

    Args:
        sessions_file: as the command takes it.
        lines: odd, even or all lines of the file.
    """
    wanted = {"odd": (1,), "even": (0,), "all": (0, 1)}[lines]
    _, sessions = read_sessions(sessions_file, BLOCK_TOKENS, refuse_bad_record)
    return [
        session
        for session in sessions
        if session.line % 2 in wanted
        and max(request.input_tokens for request in session.requests) <= LONGEST_TOKENS
    ]


def main(
    sessions_file: Annotated[Path, typer.Argument(help="claude_code_sessions.jsonl.gz, or a file like it.")],
    seeds: Annotated[int, typer.Option(min=1, max=10, help="Orders in which sessions begin.")] = 5,
    alive_at_a_time: Annotated[
        str, typer.Option("--alive", help="Comma-separated numbers of sessions that are alive at a time.")
    ] = "20",
    lines: Annotated[str, typer.Option(help="odd, even or all lines of the file.")] = "odd",
    tokens_per_second: Annotated[
        float, typer.Option(min=0, help="Of answers that take time; 0 for answers at once only.")
    ] = 50.0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
    out: Annotated[Path | None, typer.Option(help="JSON file.")] = None,
) -> None:
    """Measures and writes the results."""
    sessions = sessions_that_fit(sessions_file, lines)
    traces: list[Trace] = []
    work: list[tuple[Cell, Job]] = []
    for alive in map(int, alive_at_a_time.split(",")):
        for seed in range(seeds):
            trace = merge_sessions(f"{alive} alive", BLOCK_TOKENS, sessions, alive, seed, refuse_bad_record)
            for fraction in FRACTIONS:
                capacity = max(-(-LONGEST_TOKENS // BLOCK_TOKENS) + 2, int(fraction * trace.num_blocks))
                for arm in (*ARMS, VLLM):
                    work.append(((alive, fraction, arm), Job(len(traces), arm, capacity)))
            traces.append(trace)
    rows = rows_of(traces, work, None, jobs)
    if tokens_per_second:
        in_time = [each for each in work if each[1].policy != VLLM]
        rows += rows_of(traces, in_time, tokens_per_second, jobs)
    print_rows(f"Sessions of {lines} lines", rows)
    typer.echo(f"written to {write_results('agents_served', rows, out=out)}")


if __name__ == "__main__":
    typer.run(main)

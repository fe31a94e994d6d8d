"""Whole texts of recorded agents on an empty pool: ours beside LRU, and beside ours that ranks by turns.

    python benchmark/agents_text.py --data DIR --model .cache/models/smollm2

Coding agents (miniswe) and customer service behind one instruction (``tau_bench_airline.json``) take turns,
some of them alive at a time, until their prompts hold ``UNIQUE`` different tokens of the model's tokenizer; a
session is cut at ``LONGEST`` tokens or ``TURNS`` turns. Each goes on a log-normal while after its last turn.
Requests go through shadow caches with a server's pages and prefill chunks, which compute what a server with
its device alone does, one request at a time (``benchmark/agreement.py``).

``told alike`` is ours where each answer is said to have ended, all in the same way: nothing is learnt from
it, but nodes are ranked by the turn that was the last to visit them. A row has for each order of sessions
the computed tokens over LRU's.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np
import typer
from intervals import interval
from results import RESULTS, print_rows, write_results
from rich.progress import track
from tokenizers import Tokenizer

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmark.peers.recorded import Session, coding, cut, service
from benchmark.peers.workloads import PAGE, in_turns
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance_lab.replay.served_nodes import replay_served
from sgl_importance_lab.replay.trace import Trace, TraceBuilder

UNIQUE, LONGEST, CHUNK = 65_536, 8_000, 512
POOLS = (UNIQUE // 4, UNIQUE // 2)
ALIVE = (4, 8, 16)
ORDERS = 10
ARMS = {"ends not told": AnswerEnd.UNKNOWN, "told alike": AnswerEnd.END_OF_TURN}


def made(kinds: list[list[Session]], alive: int, seed: int) -> Trace:
    """One order of the sessions, kind after kind in turn, until there are ``UNIQUE`` tokens."""
    rng = Random(seed)
    shuffled = [rng.sample(sessions, len(sessions)) for sessions in kinds]
    mixed = [session for beside in zip(*shuffled, strict=False) for session in beside]
    trace = TraceBuilder("agents", PAGE)
    pages = set()
    for number, request in enumerate(in_turns(iter(mixed), alive, rng)):
        names = [hash(tuple(request.ids[:end])) for end in range(PAGE, len(request.ids) + PAGE, PAGE)]
        trace.add(names, input_tokens=len(request.ids), output_tokens=2, seconds=float(number))
        pages.update(names[: len(request.ids) // PAGE])
        if PAGE * len(pages) >= UNIQUE:
            break
    return trace.build()


def computed(trace: Trace, pool: int, *, is_importance: bool, end: AnswerEnd = AnswerEnd.UNKNOWN) -> int:
    told = replace(trace, answer_ends=np.full(trace.num_requests, int(end), dtype=np.int8))
    counts = replay_served(told, pool // PAGE, is_importance=is_importance, chunk_tokens=CHUNK)
    assert not counts.refused_requests
    return int(trace.input_tokens.sum()) - counts.hit_tokens


def main(
    data: Annotated[Path, typer.Option(help="Folder with agents/.")],
    model: Annotated[Path, typer.Option(help="Folder of a model, as scripts/get_model.py prints it.")],
    out: Annotated[Path, typer.Option(help="The JSON.")] = RESULTS / "agents_text.json",
) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    kinds = {
        name: [cut(session, LONGEST).prompts for session in recorded(data, tokenizer)]
        for name, recorded in (("coding", coding), ("service", service))
    }
    workloads = {"coding": [kinds["coding"]], "service": [kinds["service"]], "both": list(kinds.values())}

    @cache
    def traces(name: str, alive: int) -> list[Trace]:
        return [made(workloads[name], alive, seed) for seed in range(ORDERS)]

    rows: list[dict[str, Any]] = []
    for name, alive, pool in track(list(product(workloads, ALIVE, POOLS)), description="replaying"):
        orders = traces(name, alive)
        of_lru = [computed(trace, pool, is_importance=False) for trace in orders]
        for arm, end in ARMS.items():
            ours = [computed(trace, pool, is_importance=True, end=end) for trace in orders]
            ratios = [round(a / b, 4) for a, b in zip(ours, of_lru, strict=True)]
            requests = [trace.num_requests for trace in orders]
            row = {"workload": name, "alive": alive, "pool": pool, "arm": arm, "over_lru": ratios}
            rows.append(row | {"requests": requests, "lru_tokens": of_lru})
        write_results("agents_text", rows, out=out)
    print_rows("Over LRU", [row | {"over_lru": str(interval(row["over_lru"]))} for row in rows])


if __name__ == "__main__":
    typer.run(main)

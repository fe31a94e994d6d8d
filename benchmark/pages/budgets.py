"""Slots that requests share, beside slots that each request has for itself: what both load.

    python benchmark/pages/budgets.py

Recorded answers about documents of several lengths, as if they were decoded together, token by token;
every one reads a tenth of its context. All ways have the same device memory:

- ``shared``: one table, as the server has it: the page that is worth least leaves, whoever's it is. On a CPU
  requests read one after the other;
- ``shared, together``: the same where the requests of a step read at once, as in Triton, so that none takes
  the slot of a page that another is about to read;
- ``equal``: as many slots for each request;
- ``by use``: slots in proportion to the pages that a request reads, as SPIN sizes budgets;
- ``best split``: in hindsight, part by part to the request whose loads fall most, so that no fixed budgets
  load much less.

Counts of pages only: other work on the machine changes nothing.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.progress import track

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.pages.joint import record
from benchmark.results import print_rows, write_results
from sgl_importance.trace.page_steps import PageRecording
from sgl_importance_kernels.pages.residency_replay import ResidencyReplay
from sgl_importance_lab.study.h3 import SELECTED, saved_loads
from sgl_importance_lab.study.statistics import bootstrap

Numbers = npt.NDArray[np.int64]
POLICY = "ema"
STEPS_OF_A_SPLIT = 40
"""Parts of the memory that ``best split`` gives one after the other."""


@dataclass(frozen=True, slots=True)
class Read:
    """What a token reads in one table: pages, the attention on them, and the page that it fills."""

    table: int
    pages: Numbers
    shares: npt.NDArray[np.float32]
    open_page: int


Request = list[list[Read]]
"""Reads of each token of an answer."""


def answers(recording: PageRecording, first_page: int) -> list[Request]:
    """The first answer about each document, with page numbers from ``first_page`` on."""
    found: dict[int, Request] = {}
    for step in recording.steps:
        request = recording.requests[step.request]
        if not (step.is_generated and request.rid.startswith("decode/") and request.rid.endswith("/0")):
            continue
        if step.is_behind:
            continue
        context = request.pages[: -(-step.seq_len // recording.page_size)] + first_page
        count = max(1, int(SELECTED * len(context)))
        layers, heads, _ = step.wanted.shape
        of_token = [
            Read(
                layer * heads + head,
                context[step.wanted[layer, head, :count]],
                step.mass[layer, head, :count],
                int(context[-1]),
            )
            for layer, head in product(range(layers), range(heads))
        ]
        found.setdefault(step.request, []).append(of_token)
    return list(found.values())


def loads(requests: Sequence[Request], num_pages: int, slots: Sequence[int]) -> list[int]:
    """Pages that each request loads when all decode together.

    Args:
        requests: the same number of tokens each.
        num_pages: largest page number, and one more.
        slots: of each table of every request; a single number: of one that all share.
    """
    tables = 1 + max(read.table for read in requests[0][0])
    replays = [
        ResidencyReplay(POLICY, num_layers=tables, num_pages=num_pages, num_slots=count, staging_pages=32)
        for count in slots
    ]
    loaded = [0] * len(requests)
    for at in range(len(requests[0])):
        for replay in replays:
            replay.begin_pass()
        for number, request in enumerate(requests):
            replay = replays[0 if len(replays) == 1 else number]
            for read in request[at]:
                loaded[number] += replay.read(read.table, read.pages, read.shares, open_page=read.open_page)
    return loaded


def loads_together(requests: Sequence[Request], num_pages: int, slots: int) -> list[int]:
    """As ``loads`` with slots that all share, where all requests read before any page leaves."""
    tables = 1 + max(read.table for read in requests[0][0])
    replay = ResidencyReplay(
        POLICY, num_layers=tables, num_pages=num_pages, num_slots=slots, staging_pages=num_pages
    )
    loaded = [0] * len(requests)
    for at in range(len(requests[0])):
        replay.begin_pass()
        for table in range(tables):
            pages, shares = [], []
            for number, request in enumerate(requests):
                (read,) = (each for each in request[at] if each.table == table)
                is_complete = read.pages != read.open_page
                pages.append(read.pages[is_complete])
                shares.append(read.shares[is_complete])
                loaded[number] += int((~replay.is_resident(table, pages[-1])).sum())
            replay.read(table, np.concatenate(pages), np.concatenate(shares))
    return loaded


def best_split(requests: Sequence[Request], num_pages: int, total: int) -> list[int]:
    """Slots of each request, ``total`` in all, given in parts where they save most loads."""
    part = max(1, total // STEPS_OF_A_SPLIT)
    slots = [part] * len(requests)
    curves: list[dict[int, int]] = [{} for _ in requests]

    def of(number: int, count: int) -> int:
        if count not in curves[number]:
            curves[number][count] = loads([requests[number]], num_pages, [count])[0]
        return curves[number][count]

    while sum(slots) + part <= total:
        saved = [of(at, count) - of(at, count + part) for at, count in enumerate(slots)]
        slots[int(np.argmax(saved))] += part
    return slots


def main(
    lengths: Annotated[str, typer.Option(help="Tokens of documents, by commas.")] = "2048,4096,8192",
    documents: Annotated[int, typer.Option(help="Of each length, and as many requests.")] = 3,
    shares: Annotated[str, typer.Option(help="Slots as a share of all pages, by commas.")] = "0.12,0.2,0.4",
    out: Annotated[Path | None, typer.Option(help="Write the JSON there.")] = None,
) -> None:
    requests: list[Request] = []
    num_pages = contexts = 0
    with tempfile.TemporaryDirectory() as folder:
        for length in track(list(map(int, lengths.split(","))), description="recording"):
            recording = record(length, documents, 2, Path(folder) / f"{length}")
            requests += answers(recording, num_pages)
            num_pages += recording.num_pages
            contexts += documents * length // recording.page_size
    tokens = min(map(len, requests))
    requests = [request[:tokens] for request in requests]
    read = [sum(len(each.pages) for token in request for each in token) for request in requests]
    rows: list[dict[str, Any]] = []
    for share in track(list(map(float, shares.split(","))), description="replaying"):
        total = int(share * contexts)
        ways = {
            "shared": [total],
            "shared, together": [total],
            "equal": [total // len(requests)] * len(requests),
            "by use": [max(1, total * each // sum(read)) for each in read],
            "best split": best_split(requests, num_pages, total),
        }
        shared = loads(requests, num_pages, ways["shared"])
        for way, slots in ways.items():
            if way == "shared":
                loaded = shared
            elif way == "shared, together":
                loaded = loads_together(requests, num_pages, total)
            else:
                loaded = loads(requests, num_pages, slots)
            pairs = np.array([loaded, shared], dtype=np.float64).T
            saved = bootstrap(pairs, saved_loads)
            rows.append(
                {
                    "slots": share,
                    "way": way,
                    "requests": len(requests),
                    "read": sum(read),
                    "loaded": sum(loaded) / sum(read),
                    "of shared": 1 - saved.value,
                    "low": 1 - saved.high,
                    "high": 1 - saved.low,
                }
            )
            write_results("pages_budgets", rows, out=out)
    print_rows("Slots shared by requests, and slots of their own", rows)


if __name__ == "__main__":
    typer.run(main)

"""What a wrong eviction costs: pages that are wanted within 5 steps are taken away once, for good.

    python benchmark/eviction/wrong_evictions.py

The embedded models in transformers, greedy; thoughts beside normal decode. In the middle of the answer every
head of every layer loses ``pages`` pages of 16 tokens of its own: ``wrong`` ones, which an answer without
eviction wants within 5 steps, or as many ``right`` ones, which it does not. The page that is being filled
stays. What is left of the answer goes on, up to its first wrong token; answers that are wrong without
eviction are left out.
"""

from __future__ import annotations

import sys
import zlib
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "python")]
# ruff: noqa: E402
from benchmark.eviction.answers import DECODE, THOUGHT, Kind
from benchmark.eviction.decoder import RowKeys
from benchmark.eviction.destructive import watched
from benchmark.eviction.retention import tokens_of
from benchmark.results import RESULTS, print_rows, rows_so_far, write_results
from sgl_importance.terminal import counted
from sgl_importance_lab.study.statistics import mean_of
from sgl_importance_lab.study.thinking.measures import FALSE_WITHIN
from sgl_importance_lab.study.thinking.wants import Bools, Wants

PAGE = 16
WRONG, RIGHT = "wrong", "right"


@dataclass
class Once:
    """Takes pages away behind one step."""

    step: int
    pages: Bools

    def __call__(self, step: int, row: RowKeys) -> None:
        if step == self.step:
            row.seen[tokens_of(self.pages, PAGE, row)] = False


def taken(wants: Wants, step: int, count: int, which: str) -> Bools:
    """Of each head so many pages that are wanted within 5 steps behind ``step``, or that are not, drawn."""
    soon = wants.wanted[step + 1 : step + 1 + FALSE_WITHIN].any(0)
    candidates = soon if which == WRONG else ~soon
    candidates = candidates & (np.arange(soon.shape[1]) < wants.num_pages[step] - 1)
    draws = np.random.default_rng(zlib.crc32(f"{wants.rid}/{which}".encode())).random(soon.shape)
    order = np.argsort(np.where(candidates, draws, 2.0), axis=1)[:, :count]
    chosen = np.zeros(soon.shape, np.bool_)
    np.put_along_axis(chosen, order, True, axis=1)
    return chosen & candidates


def main(
    pages: Annotated[str, typer.Option(help="That each head loses, separated by commas.")] = "1,2,4,8",
    length: Annotated[int, typer.Option(help="Tokens of a thought, and of a text.")] = 1024,
    n: Annotated[int, typer.Option(min=2, help="Answers of a cell.")] = 20,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    out: Annotated[Path, typer.Option(help="The JSON, with the cells so far.")] = RESULTS
    / "wrong_evictions.json",
) -> None:
    torch.set_num_threads(threads)
    rows = rows_so_far(out)
    for name in (THOUGHT, DECODE):
        kind = Kind(name)
        asked = kind.asked(length, range(n))
        answers, wants = watched(kind, asked, PAGE)
        is_right = [each.right_before(tokens) == 1 for each, tokens in zip(asked, answers, strict=True)]
        asked, wants = list(compress(asked, is_right)), list(compress(wants, is_right))
        for count in map(int, pages.split(",")):
            for which in (WRONG, RIGHT):
                if (name, count, which) in {(row["kind"], row["pages"], row["which"]) for row in rows}:
                    continue
                once = [
                    Once(step, taken(each, step, count, which))
                    for each in wants
                    for step in [each.num_steps // 2]
                ]
                with counted(f"{name}: {count} {which}", max(len(e.right) for e in asked)) as advance:
                    found = kind.answers(asked, once, advance)
                parts = [each.right_before(tokens) for each, tokens in zip(asked, found, strict=True)]
                right = mean_of([float(part == 1) for part in parts])
                rows.append(
                    {
                        "kind": name,
                        "pages": count,
                        "which": which,
                        "n": len(asked),
                        "evicted": int(sum(each.pages.sum() for each in once)),
                        "right": right.value,
                        "low": right.low,
                        "high": right.high,
                        "right before": float(np.mean(parts)),
                    }
                )
                write_results("wrong_evictions", rows, out=out)
    print_rows("answers behind evictions", rows)


if __name__ == "__main__":
    typer.run(main)

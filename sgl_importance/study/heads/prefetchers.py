"""What to bring to the device before the next step: rules that name pages; only the oracle sees the future.

Like a rule that keeps pages, one that fetches gives each page a score after every step; -inf for a page that
it does not name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import numpy as np

from sgl_importance.study.thinking.keep_rules import Scores, ema
from sgl_importance.study.thinking.marks import Marks
from sgl_importance.study.thinking.wants import Bools, Wants

Prefetcher = Callable[[Wants], Iterator[Scores]]
"""Scores [heads, columns] after each step. The array is used before the next one is asked for."""


def next_page(wants: Wants) -> Iterator[Scores]:
    """The page behind each that was read; behind the one with the most attention first."""
    for wanted, mass in zip(wants.wanted, wants.mass, strict=True):
        scores = np.full(wanted.shape, -np.inf)
        scores[:, 1:] = _named(wanted, mass)[:, :-1]
        yield scores


def highest_average(wants: Wants) -> Iterator[Scores]:
    """The exponential average of a page's attention, as the rule that keeps pages by it."""
    for step, average in enumerate(ema(wants)):
        yield _existing(average, int(wants.num_pages[step]))


def any_page(wants: Wants) -> Iterator[Scores]:
    """The control: some pages, the same ones after every step."""
    draws = np.random.default_rng(zlib.crc32(wants.rid.encode()) + 1)
    scores = draws.random(wants.wanted.shape[1:])
    for num_pages in wants.num_pages.tolist():
        yield _existing(scores, num_pages)


def next_reads(wants: Wants) -> Iterator[Scores]:
    """What the next step reads. It sees the future, as a bound."""
    for step in range(wants.num_steps - 1):
        yield _existing(_named(wants.wanted[step + 1], wants.mass[step + 1]), int(wants.num_pages[step]))
    yield np.full(wants.wanted.shape[1:], -np.inf)


def behind_milestones(marks: Marks) -> Prefetcher:
    """Where a page with a milestone is read, the pages behind it, up to the next milestone."""

    def rule(wants: Wants) -> Iterator[Scores]:
        follow = _stretches(marks, wants)
        for wanted, mass in zip(wants.wanted, wants.mass, strict=True):
            found = _named(wanted, mass)
            scores = np.full(wanted.shape, -np.inf)
            for column, last in follow:
                behind = scores[:, column + 1 : last + 1]
                np.maximum(behind, found[:, column, None], out=behind)
            yield scores

    return rule


def _stretches(marks: Marks, wants: Wants) -> list[tuple[int, int]]:
    """Columns with a milestone whose stretch goes on behind them, with the last column of it."""
    pages = np.array(sorted(marks.milestones), np.int64)
    starts = pages[:-1] // wants.page_size - wants.first_page
    ends = (pages[1:] - 1) // wants.page_size - wants.first_page
    return [
        (start, end) for start, end in zip(starts.tolist(), ends.tolist(), strict=True) if 0 <= start < end
    ]


def _named(wanted: Bools, mass: Scores) -> Scores:
    return np.where(wanted, mass, -np.inf)


def _existing(scores: Scores, num_pages: int) -> Scores:
    named = np.full(scores.shape, -np.inf)
    named[:, :num_pages] = scores[:, :num_pages]
    return named

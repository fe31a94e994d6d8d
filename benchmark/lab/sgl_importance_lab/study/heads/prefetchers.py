"""What to bring to the device before the next step: rules that name pages; only the oracle sees the future.

Like a rule that keeps pages, one that fetches gives each page a score after every step; -inf for a page that
it does not name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import numpy as np

from sgl_importance_lab.study.thinking.keep_rules import Scores
from sgl_importance_lab.study.thinking.marks import Marks
from sgl_importance_lab.study.thinking.wants import Bools, Wants

Prefetcher = Callable[[Wants], Iterator[Scores]]
"""Scores [heads, columns] after each step, used before the next ones are asked for. Those of pages that are
not there yet are not looked at. A rule that keeps pages is one, too: it names all of them."""


def next_page(wants: Wants) -> Iterator[Scores]:
    """The page behind each that was read; behind the one with the most attention first."""
    for wanted, mass in zip(wants.wanted, wants.mass, strict=True):
        scores = np.full(wanted.shape, -np.inf)
        scores[:, 1:] = _named(wanted, mass)[:, :-1]
        yield scores


def any_page(wants: Wants) -> Iterator[Scores]:
    """The control: some pages, the same ones after every step."""
    draws = np.random.default_rng(zlib.crc32(wants.rid.encode()) + 1)
    scores = draws.random(wants.wanted.shape[1:])
    for _ in range(wants.num_steps):
        yield scores


def next_reads(wants: Wants) -> Iterator[Scores]:
    """What the next step reads. It sees the future, as a bound."""
    for step in range(wants.num_steps - 1):
        yield _named(wants.wanted[step + 1], wants.mass[step + 1])
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
    columns = np.array(sorted(marks.milestones), np.int64) // wants.page_size - wants.first_page
    lasts = (np.array(sorted(marks.milestones), np.int64) - 1) // wants.page_size - wants.first_page
    found = zip(columns[:-1].tolist(), lasts[1:].tolist(), strict=True)
    return [(start, last) for start, last in found if 0 <= start < min(last, wants.wanted.shape[2])]


def _named(wanted: Bools, mass: Scores) -> Scores:
    return np.where(wanted, mass, -np.inf)

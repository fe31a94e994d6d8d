"""How wanted pages move from step to step, and how well kept ones foresee them; sums of one request.

Every measure gives (numerator, denominator) of each head, so that requests can be resampled: float64
[heads, 2]. Definitions follow FlexiCache's overlap and LazyEviction's recurrence.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sgl_importance_lab.study.thinking.wants import Bools, Counts, Wants

Parts = npt.NDArray[np.float64]
"""Where a measure takes ``of``, bool [steps], only what happens at these steps counts."""

RANKED_EVERY = 16
FALSE_WITHIN = 5
DISTANCE_BOUNDS = (1, 4, 16, 64, 256, 1024)
"""Upper ends, in steps, of the columns of ``reuse_distances``."""


def _parts(numerator: npt.NDArray[np.generic], denominator: npt.NDArray[np.generic]) -> Parts:
    return np.stack([numerator, denominator], axis=-1).astype(np.float64)


def recall(wants: Wants, kept: Bools, horizon: int, steps: Counts | None = None) -> Parts:
    """Of the pages that a token ``horizon`` steps on wants, those that are kept now. Pages that are not there
    yet count for nothing.

    ``steps``: only the tokens at these, by their index.
    """
    ahead = np.arange(horizon, wants.num_steps) if steps is None else steps[steps >= horizon]
    wanted = wants.wanted[ahead] & wants.exists()[ahead - horizon]
    return _parts((wanted & kept[ahead - horizon]).sum((0, 2)), wanted.sum((0, 2)))


def mass_recall(wants: Wants, kept: Bools, horizon: int) -> Parts:
    """The same by attention: of the mass on pages that are there by now, that on kept ones."""
    mass = wants.mass[horizon:] * wants.exists(slice(0, wants.num_steps - horizon))
    return _parts((mass * kept[: wants.num_steps - horizon]).sum((0, 2)), mass.sum((0, 2)))


def adjacent_jaccard(wants: Wants, of: Bools | None = None) -> Parts:
    """Jaccard index of what two steps in a row want: sum, and number of pairs."""
    now, then = wants.wanted[:-1], wants.wanted[1:]
    union = np.maximum((now | then).sum(2), 1)
    index = ((now & then).sum(2) / union)[_chosen(wants, of)[1:]]
    return _parts(index.sum(0), np.full(wants.num_heads, len(index)))


def _chosen(wants: Wants, of: Bools | None) -> Bools:
    return np.ones(wants.num_steps, np.bool_) if of is None else of


def rank_consistency(wants: Wants, of: Bools | None = None) -> Parts:
    """FlexiCache's overlap RCO: sum, and number of comparisons.

    The first step of every 16 against each of the next 15: max(0, (shared / K - K / N) / (1 - K / N)) of K
    wanted pages out of N.
    """
    total, count = np.zeros(wants.num_heads), 0
    for start in range(0, wants.num_steps, RANKED_EVERY):
        reference = wants.wanted[start]
        behind = slice(start + 1, start + RANKED_EVERY)
        others = wants.wanted[behind][_chosen(wants, of)[behind]]
        num_wanted = reference.sum(1)
        chance = num_wanted / max(int(wants.num_pages[start]), 1)
        shared = (others & reference).sum(2) / np.maximum(num_wanted, 1)
        total += np.maximum(0, (shared - chance) / np.maximum(1 - chance, 1e-9)).sum(0)
        count += len(others)
    return _parts(total, np.full(wants.num_heads, count))


def promoted(wants: Wants, of: Bools | None = None) -> Parts:
    """Of the pages that a ranking every 16 steps wants, those that the ranking before did not."""
    ranked = wants.wanted[::RANKED_EVERY]
    now, before = (each[_chosen(wants, of)[::RANKED_EVERY][1:]] for each in (ranked[1:], ranked[:-1]))
    return _parts((now & ~before).sum((0, 2)), now.sum((0, 2)))


def false_evictions(wants: Wants, kept: Bools, of: Bools | None = None) -> Parts:
    """Of the pages that stop being kept, those that one of the next 5 steps wants."""
    soon = np.zeros_like(wants.wanted)
    for ahead in range(1, FALSE_WITHIN + 1):
        soon[:-ahead] |= wants.wanted[ahead:]
    evicted = kept[:-1] & ~kept[1:] & _chosen(wants, of)[1:, None, None]
    return _parts((evicted & soon[1:]).sum((0, 2)), evicted.sum((0, 2)))


def reuse_distances(wants: Wants, of: Bools | None = None) -> Counts:
    """Wants by steps since the page was wanted before: those of ``DISTANCE_BOUNDS``, more, never; int64."""
    last = np.full(wants.wanted.shape[1:], -1)
    counts = np.zeros(len(DISTANCE_BOUNDS) + 2, np.int64)
    counted = _chosen(wants, of)
    for step, wanted in enumerate(wants.wanted):
        before = last[wanted]
        again = before[before >= 0]
        if counted[step]:
            columns = np.searchsorted(DISTANCE_BOUNDS, step - again)
            counts[:-1] += np.bincount(columns, minlength=len(DISTANCE_BOUNDS) + 1)
            counts[-1] += len(before) - len(again)
        last[wanted] = step
    return counts


def recurrence(wants: Wants, active_mass: float, of: Bools | None = None) -> Parts:
    """Of the pages that are ever read again, those whose largest gap between two reads is above one step.

    ``active_mass``: attention to a token from which on a page counts as read, times its tokens.
    """
    read = wants.mass > active_mass * wants.page_size
    last = np.full(wants.wanted.shape[1:], -1)
    gap = np.zeros_like(last)
    counted = _chosen(wants, of)
    for step, now in enumerate(read):
        again = now & (last >= 0) & counted[step]
        gap[again] = np.maximum(gap[again], step - last[again])
        last[now] = step
    return _parts((gap > 1).sum(1), (gap > 0).sum(1))


def late_wants(wants: Wants, columns: Bools, behind_tokens: int, of: Bools | None = None) -> Parts:
    """How often pages are wanted that lie at least ``behind_tokens`` back: wants, and steps that could.

    ``columns``: which pages count; [columns], or [heads, columns].
    """
    behind = -(-behind_tokens // wants.page_size)
    old = np.arange(wants.wanted.shape[2]) < (wants.num_pages - behind)[:, None]
    old &= _chosen(wants, of)[:, None]
    of_heads = old[:, None, :] & np.broadcast_to(columns, wants.wanted.shape[1:])
    return _parts((wants.wanted & of_heads).sum((0, 2)), of_heads.sum((0, 2)))

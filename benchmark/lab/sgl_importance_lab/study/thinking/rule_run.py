"""One rule over one request: which pages it would keep, and what would be loaded if it only evicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sgl_importance_lab.study.thinking.keep_rules import KeepRule, Scores
from sgl_importance_lab.study.thinking.measures import Parts
from sgl_importance_lab.study.thinking.wants import Bools, Counts, Wants

STEPS_AT_A_TIME = 64
"""Ranked together."""


@dataclass(frozen=True, slots=True)
class RuleRun:
    """What a rule did with room for a share of the pages.

    Attributes:
        share: of the pages that exist at a step, rounded up.
        kept: the pages of highest score after each step, wherever they are; newer ones first where scores
            are equal, and always the page that is being filled. [steps, heads, columns].
        misses: with pages that come to the device only when they are wanted, and leave it by their score:
            those that had to be loaded, and all that were wanted, of each head. The page that is being filled
            is there. [heads, 2].
        loads: pages that had to be loaded, of each step and head; int64 [steps, heads].
    """

    share: float
    kept: Bools
    misses: Parts
    loads: Counts


def run_rule(wants: Wants, rule: KeepRule, shares: Sequence[float]) -> list[RuleRun]:
    """Both readings of a rule, for each share of the pages."""
    budgets = np.ceil(np.outer(wants.num_pages, shares)).astype(np.int64)
    kept = np.zeros((len(shares), *wants.wanted.shape), np.bool_)
    resident = np.zeros((len(shares), *wants.wanted.shape[1:]), np.bool_)
    misses = np.zeros((len(shares), wants.num_heads, 2))
    loads = np.zeros((len(shares), wants.num_steps, wants.num_heads), np.int64)
    ranked = rule(wants)
    for start in range(0, wants.num_steps, STEPS_AT_A_TIME):
        num_pages = wants.num_pages[start : start + STEPS_AT_A_TIME]
        ranks = ranks_of(np.stack([next(ranked).copy() for _ in num_pages]), num_pages)
        for step, of_step in enumerate(ranks, start):
            kept[:, step] = of_step < budgets[step, :, None, None]
            if wants.num_pages[step]:
                read = _read(resident, wants.wanted[step], int(wants.num_pages[step]) - 1)
                misses += read
                loads[:, step] = read[:, :, 0]
                evict(resident, of_step, budgets[step])
    return [RuleRun(*each) for each in zip(shares, kept, misses, loads, strict=True)]


def ranks_of(scores: Scores, num_pages: Counts, pool_heads: int = 1) -> Counts:
    """0 for the page that is kept first; newer pages first among equal ones, and the newest before all.

    Args:
        scores: after each step, [steps, heads, columns]; overwritten.
        num_pages: that exist at each step. The ranks of the other columns are behind theirs.
        pool_heads: heads in a row whose pages are ranked together.

    Returns:
        [steps, heads / pool_heads, pool_heads * columns].
    """
    columns = np.arange(scores.shape[2])
    newest = (num_pages - 1)[:, None, None]
    scores[np.broadcast_to(columns > newest, scores.shape)] = -np.inf
    scores[np.broadcast_to(columns == newest, scores.shape)] = np.inf
    pools = scores.reshape(len(scores), -1, pool_heads * len(columns))
    order = np.argsort(-pools[:, :, ::-1], axis=2, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.arange(pools.shape[2])[None, None], axis=2)
    return ranks[:, :, ::-1]


def _read(resident: Bools, wanted: Bools, being_filled: int) -> Parts:
    """Brings what is wanted, in place; pages loaded and pages wanted of each share and head, [..., 2]."""
    resident[:, :, being_filled] = True
    loaded = (wanted & ~resident).sum(2)
    resident |= wanted
    return np.stack([loaded, np.broadcast_to(wanted.sum(1), loaded.shape)], axis=2)


def evict(resident: Bools, ranks: Counts, budgets: Counts) -> None:
    """Leaves the best of those that are there, as many as fit, in place.

    Args:
        resident: [shares, heads or pools, pages].
        ranks: 0 for the best, [heads or pools, pages].
        budgets: that fit, [shares].
    """
    last = np.minimum(budgets, ranks.shape[1]) - 1
    among = np.where(resident, ranks, ranks.shape[1])
    ordered = np.partition(among, np.unique(last), axis=2)
    worst_kept = ordered[np.arange(len(budgets)), :, last]
    resident &= among <= worst_kept[:, :, None]

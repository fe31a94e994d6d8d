"""One rule over one request: which pages it would keep, and what would be loaded if it only evicted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sgl_importance.study.thinking.keep_rules import KeepRule, Scores
from sgl_importance.study.thinking.measures import Parts
from sgl_importance.study.thinking.wants import Bools, Counts, Wants


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
    """

    share: float
    kept: Bools
    misses: Parts


def run_rule(wants: Wants, rule: KeepRule, shares: Sequence[float]) -> list[RuleRun]:
    """Both readings of a rule, for each share of the pages."""
    kept = [np.zeros_like(wants.wanted) for _ in shares]
    resident = [np.zeros(wants.wanted.shape[1:], np.bool_) for _ in shares]
    misses = [np.zeros((wants.num_heads, 2)) for _ in shares]
    for step, scores in enumerate(rule(wants)):
        num_pages = int(wants.num_pages[step])
        if not num_pages:
            continue
        ranks = _ranks(scores[:, :num_pages])
        wanted = wants.wanted[step, :, :num_pages]
        for at, share in enumerate(shares):
            budget = math.ceil(share * num_pages)
            kept[at][step, :, :num_pages] = ranks < budget
            there = resident[at][:, :num_pages]
            there[:, -1] = True
            misses[at] += np.stack([(wanted & ~there).sum(1), wanted.sum(1)], axis=1)
            there |= wanted
            _evict(there, ranks, budget)
    return [RuleRun(*each) for each in zip(shares, kept, misses, strict=True)]


def _ranks(scores: Scores) -> Counts:
    """0 for the page that is kept first; newer pages first among equal ones, and the newest before all."""
    ranked = scores[:, ::-1].copy()
    ranked[:, 0] = np.inf
    order = np.argsort(-ranked, axis=1, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.arange(order.shape[1])[None], axis=1)
    return ranks[:, ::-1]


def _evict(there: Bools, ranks: Counts, budget: int) -> None:
    """Leaves the ``budget`` best of those that are there, in place; [heads, pages]."""
    if budget < there.shape[1]:
        among = np.where(there, ranks, there.shape[1])
        worst_kept = np.partition(among, budget - 1, axis=1)[:, budget - 1 : budget]
        there &= among <= worst_kept

"""One answer over the slots of its layers: what steps wait for, what is fetched ahead, and what leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sgl_importance_lab.study.heads.prefetchers import Prefetcher
from sgl_importance_lab.study.thinking.keep_rules import KeepRule, Scores
from sgl_importance_lab.study.thinking.rule_run import STEPS_AT_A_TIME, evict, ranks_of
from sgl_importance_lab.study.thinking.wants import Bools, Wants


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Counts of units: a page, or one head of it.

    Attributes:
        share: of a layer's pages that its device bytes hold, what is fetched ahead included.
        steps: of the answer.
        read: by all of them.
        loaded: that a step waited for.
        batches: steps of a layer that waited for any.
        fetched: ahead.
        unread: of these, those that were let go before a step read them.
        left: different ones of the answer that left their slots: what goes to a tier below, once.
    """

    share: float
    steps: int
    read: int
    loaded: int
    batches: int
    fetched: int
    unread: int
    left: int


def run_slots(
    wants: Wants,
    rule: KeepRule,
    shares: Sequence[float],
    *,
    pool_heads: int = 1,
    prefetcher: Prefetcher | None = None,
    buffer_share: float = 0.0,
) -> list[SlotRun]:
    """Pages come when they are wanted or ahead, and leave their slots by the rule's score.

    What is fetched ahead waits in a buffer that is part of the same device bytes, and takes a slot when it is
    read. The buffer holds what the prefetcher names after each step, as much as fits; what it names no more
    is let go. What was on the device in the last step comes into the buffer without a copy. As in
    ``run_rule``, the page that is being filled is on the device, and nothing is at first.

    Args:
        wants: of one answer.
        rule: of the slots.
        shares: of the pages that fit at each step, rounded up.
        pool_heads: heads in a row that share their slots.
        prefetcher: names units after each step; None fetches nothing.
        buffer_share: of the pages, that the buffer holds.
    """
    steps, heads, columns = wants.wanted.shape
    shape = (len(shares), heads // pool_heads, pool_heads * columns)
    budgets = pool_heads * np.ceil(np.outer(wants.num_pages, shares)).astype(np.int64)
    rooms = np.zeros(steps, np.int64)
    if prefetcher is not None:
        rooms = pool_heads * np.ceil(wants.num_pages * buffer_share).astype(np.int64)
        rooms = np.minimum(rooms, budgets.min(1) - pool_heads)  # the page that is being filled has a slot
    budgets -= rooms[:, None]
    resident, buffer, copied, has_left = (np.zeros(shape, np.bool_) for _ in range(4))
    loaded, batches, fetched, unread = (np.zeros(len(shares), np.int64) for _ in range(4))
    ranked = rule(wants)
    named = None if prefetcher is None else prefetcher(wants)
    for start in range(0, steps, STEPS_AT_A_TIME):
        num_pages = wants.num_pages[start : start + STEPS_AT_A_TIME]
        ranks = ranks_of(np.stack([next(ranked).copy() for _ in num_pages]), num_pages, pool_heads)
        for step, of_step in enumerate(ranks, start):
            wanted = wants.wanted[step].reshape(shape[1:])
            resident.reshape(-1, heads, columns)[:, :, wants.num_pages[step] - 1] = True
            missing = (wanted & ~resident & ~buffer).sum(2)
            loaded += missing.sum(1)
            batches += (missing > 0).sum(1)
            resident |= wanted
            buffer &= ~wanted
            copied &= ~wanted
            was_here = resident | buffer
            evict(resident, of_step, budgets[step])
            if named is not None:
                exists = np.arange(columns) < wants.num_pages[step]
                scores = np.where(exists, next(named), -np.inf).reshape(shape[1:])
                chosen = _best(scores, resident, int(rooms[step]))
                fetched += (chosen & ~was_here).sum((1, 2))
                unread += (copied & ~chosen).sum((1, 2))
                copied = chosen & (copied | ~was_here)
                buffer = chosen
            has_left |= was_here & ~resident & ~buffer
    unread += copied.sum((1, 2))
    left = has_left.reshape(-1, heads, columns)[:, :, wants.prompt_pages :].sum((1, 2))
    read = int(wants.wanted.sum())
    counts = np.stack([loaded, batches, fetched, unread, left], axis=1).tolist()
    return [SlotRun(share, steps, read, *of_share) for share, of_share in zip(shares, counts, strict=True)]


def _best(scores: Scores, resident: Bools, count: int) -> Bools:
    """Units that the buffer takes: of those that are named and have no slot, the best of each pool.

    Args:
        scores: -inf for what is not named, [pools, units].
        resident: [shares, pools, units].
        count: that fit for a pool.
    """
    chosen = np.zeros(resident.shape, np.bool_)
    if not count:
        return chosen
    candidates = np.where(resident, -np.inf, scores)
    count = min(count, scores.shape[1])
    best = np.argpartition(-candidates, count - 1, axis=2)[:, :, :count]
    np.put_along_axis(chosen, best, np.take_along_axis(candidates, best, axis=2) > -np.inf, axis=2)
    return chosen

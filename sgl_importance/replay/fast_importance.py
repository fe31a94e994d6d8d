"""``importance`` on prefix trees, compiled: counts exactly what ``replay_tree(ImportanceReplayPolicy)`` does.

Blocks last visited by the same request lie on one path, and of a path at most one block is evictable. So
there is at most one candidate per request, ages are counted in requests, and the oldest candidate of a
class and age bucket is the first set bit of a range: no heap, and memory linear in blocks and requests.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from sgl_importance import life_table, reuse
from sgl_importance.life_table import FloatArray
from sgl_importance.replay.cache import ReplayCounts
from sgl_importance.replay.sessions import BlockFacts, block_facts
from sgl_importance.replay.trace import NO_PARENT, IntArray, Trace

_BitArray = npt.NDArray[np.uint64]


class _Rules(NamedTuple):
    """Constants of life table and estimator, as an argument: numba would freeze globals into its cache."""

    bucket_starts: IntArray
    bucket_widths: FloatArray
    prior_hazard: float
    prior_strength: float
    level_ratios: FloatArray
    ratio_strength: float
    class_strength: float
    gap_hazards: FloatArray
    gap_strength: float
    decay: float
    refresh_interval: int
    max_age: int


def _rules() -> _Rules:
    return _Rules(
        bucket_starts=life_table.BUCKET_STARTS,
        bucket_widths=life_table.BUCKET_WIDTHS,
        prior_hazard=life_table.PRIOR_HAZARD,
        prior_strength=life_table.PRIOR_STRENGTH,
        level_ratios=life_table.LEVEL_RATIOS,
        ratio_strength=life_table.RATIO_STRENGTH,
        class_strength=life_table.CLASS_STRENGTH,
        gap_hazards=life_table.GAP_HAZARDS,
        gap_strength=life_table.GAP_STRENGTH,
        decay=0.5 ** (reuse.REFRESH_INTERVAL / reuse.HALF_LIFE),
        refresh_interval=reuse.REFRESH_INTERVAL,
        max_age=life_table.MAX_AGE,
    )


def replay_importance(trace: Trace, capacity: int, facts: BlockFacts | None = None) -> ReplayCounts:
    """Replays a prefix tree under ``importance`` with g = 1 and uniform cost.

    Args:
        trace: a trace with parents.
        capacity: blocks that the cache can hold, at least 1.
        facts: ``block_facts(trace)``, where the caller has them.
    """
    assert trace.parents is not None
    assert capacity > 0
    facts = facts if facts is not None else block_facts(trace)
    used_classes, first_uses, classes = np.unique(facts.reuse_classes, return_index=True, return_inverse=True)
    levels = facts.visit_levels[first_uses] if len(used_classes) else np.zeros(1, dtype=np.int64)
    hit_blocks, hit_tokens, full_hits, evicted, rejected = _replay(
        trace.blocks,
        trace.offsets,
        trace.parents,
        classes.astype(np.int64),
        levels,
        facts.watched,
        trace.input_tokens,
        trace.block_tokens,
        capacity,
        _rules(),
    )
    return ReplayCounts(hit_blocks, hit_tokens, full_hits, evicted, rejected)


@numba.njit(cache=True)
def _update_index(
    hits: FloatArray, reached: FloatArray, levels: IntArray, index: FloatArray, rules: _Rules
) -> None:
    """``hazards`` and ``retention_index`` of ``sgl_importance.life_table``, to the last bit."""
    num_classes, num_buckets = hits.shape
    pooled = np.empty(num_buckets)
    for bucket in range(num_buckets):
        hit_sum = 0.0
        reached_sum = 0.0
        for row in range(num_classes):
            hit_sum += hits[row, bucket]
            reached_sum += reached[row, bucket]
        pooled[bucket] = (hit_sum + rules.prior_strength * rules.prior_hazard) / (
            reached_sum + rules.prior_strength
        )
    observed = np.zeros(num_classes)
    expected = np.zeros(num_classes)
    num_counted = len(rules.level_ratios)
    level_observed = np.zeros(num_counted)
    level_expected = np.zeros(num_counted)
    for row in range(num_classes):
        for bucket in range(num_buckets):
            observed[row] += hits[row, bucket]
            expected[row] += reached[row, bucket] * pooled[bucket]
        if levels[row] < num_counted:
            level_observed[levels[row]] += observed[row]
            level_expected[levels[row]] += expected[row]
    level_ratio = (level_observed + rules.ratio_strength * rules.level_ratios) / (
        level_expected + rules.ratio_strength
    )
    hazard = np.empty(num_buckets)
    for row in range(num_classes):
        level = levels[row]
        counted = level < num_counted
        strength = rules.class_strength if counted else rules.gap_strength
        ratio = 0.0
        if counted:
            ratio = (observed[row] + rules.ratio_strength * level_ratio[level]) / (
                expected[row] + rules.ratio_strength
            )
        for bucket in range(num_buckets):
            prior = ratio * pooled[bucket] if counted else rules.gap_hazards[level - num_counted, bucket]
            posterior = (hits[row, bucket] + strength * prior) / (reached[row, bucket] + strength)
            hazard[bucket] = min(posterior, 1.0)
        for first in range(num_buckets):
            best = 0.0
            survival = 1.0
            kept = 0.0
            for bucket in range(first, num_buckets):
                visit = survival * hazard[bucket]
                survival = survival - visit
                kept += (survival + 0.5 * visit) * rules.bucket_widths[bucket]
                best = max(best, (1.0 - survival) / kept)
            index[row, first] = best


@numba.njit(cache=True)
def _age_bucket(bucket_starts: IntArray, age: int) -> int:
    return int(np.searchsorted(bucket_starts, max(age, 1), side="right")) - 1


@numba.njit(cache=True)
def _first_set(bits: _BitArray, low: int, high: int) -> int:
    """First set bit in [low, high], or -1."""
    word_number = low >> 6
    word = bits[word_number] & (~np.uint64(0) << np.uint64(low & 63))
    while word == 0:
        word_number += 1
        if word_number > high >> 6:
            return -1
        word = bits[word_number]
    position = word_number << 6
    for shift in (32, 16, 8, 4, 2, 1):
        if word & ((np.uint64(1) << np.uint64(shift)) - np.uint64(1)) == 0:
            word >>= np.uint64(shift)
            position += shift
    return position if position <= high else -1


@numba.njit(cache=True)
def _set_candidate(
    block: int, bits: _BitArray, lowest: IntArray, candidate: IntArray, classes: IntArray, visited: IntArray
) -> None:
    clock, row = visited[block], classes[block]
    candidate[clock] = block
    bits[row, clock >> 6] |= np.uint64(1) << np.uint64(clock & 63)
    lowest[row] = min(lowest[row], clock)


@numba.njit(cache=True)
def _clear_candidate(block: int, bits: _BitArray, classes: IntArray, visited: IntArray) -> None:
    clock = visited[block]
    bits[classes[block], clock >> 6] &= ~(np.uint64(1) << np.uint64(clock & 63))


@numba.njit(cache=True)
def _rank_cells(index: FloatArray, rank: IntArray) -> IntArray:
    """Cells (class x buckets + bucket) by index; ``rank`` becomes the first position of a cell's index."""
    flat = index.ravel()
    order = np.argsort(flat)
    ranks = rank.ravel()
    for position in range(len(order)):
        tied = position > 0 and flat[order[position]] == flat[order[position - 1]]
        ranks[order[position]] = ranks[order[position - 1]] if tied else position
    return order


@numba.njit(cache=True)
def _cheapest(
    clock: int,
    order: IntArray,
    start: int,
    index: FloatArray,
    bucket_starts: IntArray,
    bits: _BitArray,
    lowest: IntArray,
) -> tuple[int, int]:
    """Clock of the candidate that loses least, and the position of its cell; there is a candidate.

    Cells before position ``start`` of ``order`` hold none.
    """
    num_buckets = index.shape[1]
    best = -1
    best_loss = np.inf
    best_position = start
    for position in range(start, len(order)):
        cell = order[position]
        row, bucket = cell // num_buckets, cell % num_buckets
        if lowest[row] > clock:
            continue
        loss = index[row, bucket]
        if loss > best_loss:
            break
        high = clock if bucket == 0 else clock - bucket_starts[bucket]
        low = 1 if bucket == num_buckets - 1 else clock - bucket_starts[bucket + 1] + 1
        low = max(low, lowest[row])
        if low > high:
            continue
        found = _first_set(bits[row], low, high)
        if found >= 0:
            if low == lowest[row]:
                lowest[row] = found
            if best < 0:
                best_position = position
            if best < 0 or found < best:
                best, best_loss = found, loss
        elif low == lowest[row]:
            lowest[row] = high + 1
    return best, best_position


@numba.njit(cache=True)
def _replay(
    blocks: IntArray,
    offsets: IntArray,
    parents: IntArray,
    access_classes: IntArray,
    levels: IntArray,
    watched: npt.NDArray[np.bool_],
    input_tokens: IntArray,
    block_tokens: int,
    capacity: int,
    rules: _Rules,
) -> tuple[int, int, int, int, int]:
    bucket_starts, max_age = rules.bucket_starts, rules.max_age
    num_requests, num_blocks, num_buckets = len(offsets) - 1, len(parents), len(bucket_starts)
    resident = np.zeros(num_blocks, dtype=np.bool_)
    children = np.zeros(num_blocks, dtype=np.int32)
    visited = np.zeros(num_blocks, dtype=np.int64)  # clock of the last visit, 0 before the first
    classes = np.zeros(num_blocks, dtype=np.int64)
    is_watched = np.zeros(num_blocks, dtype=np.bool_)
    candidate = np.zeros(num_requests + 1, dtype=np.int64)
    num_classes = len(levels)
    bits = np.zeros((num_classes, (num_requests >> 6) + 1), dtype=np.uint64)
    lowest = np.full(num_classes, num_requests + 1, dtype=np.int64)
    ring = min(max_age, num_requests + 1)
    open_watches = np.zeros((ring, num_classes), dtype=np.int32)
    hits = np.zeros((num_classes, num_buckets))
    reached = np.zeros((num_classes, num_buckets))
    index = np.zeros((num_classes, num_buckets))
    _update_index(hits, reached, levels, index, rules)
    rank = np.empty(index.shape, dtype=np.int64)
    order = _rank_cells(index, rank)
    used, hit_blocks, hit_tokens, full_hits, evicted, rejected = 0, 0, 0, 0, 0, 0
    for request in range(num_requests):
        clock = request + 1
        open_watches[clock % ring] = 0
        for bucket in range(num_buckets):
            start = clock - bucket_starts[bucket]
            if start <= 0:
                break
            for row in range(num_classes):
                reached[row, bucket] += open_watches[start % ring, row]
        if clock % rules.refresh_interval == 0:
            hits *= rules.decay
            reached *= rules.decay
            _update_index(hits, reached, levels, index, rules)
            order = _rank_cells(index, rank)

        first, length = offsets[request], offsets[request + 1] - offsets[request]
        hit = 0
        while hit < length and resident[blocks[first + hit]]:
            hit += 1
        hit_blocks += hit
        hit_tokens += min(hit * block_tokens, input_tokens[request])
        if hit == length and length > 0:
            full_hits += 1
        if hit > 0 and children[blocks[first + hit - 1]] == 0:
            _clear_candidate(blocks[first + hit - 1], bits, classes, visited)
        for position in range(length):
            block = blocks[first + position]
            if position >= hit:
                resident[block] = True
                used += 1
                if position > 0:
                    children[blocks[first + position - 1]] += 1
            if is_watched[block]:
                age = clock - visited[block]
                hits[classes[block], _age_bucket(bucket_starts, age)] += 1.0
                if age < max_age:
                    open_watches[visited[block] % ring, classes[block]] -= 1
            visited[block] = clock
            classes[block] = access_classes[first + position]
            is_watched[block] = watched[first + position]
            if is_watched[block]:
                open_watches[clock % ring, classes[block]] += 1
        if length > 0 and children[blocks[first + length - 1]] == 0:
            _set_candidate(blocks[first + length - 1], bits, lowest, candidate, classes, visited)

        remaining = length  # of the path, while the request's own blocks are given up from its end
        position_of_victim = 0
        while used > capacity:
            oldest, position_of_victim = _cheapest(
                clock, order, position_of_victim, index, bucket_starts, bits, lowest
            )
            victim = candidate[oldest]
            _clear_candidate(victim, bits, classes, visited)
            resident[victim] = False
            used -= 1
            if oldest == clock:
                remaining -= 1
            if oldest == clock and remaining >= hit:
                rejected += 1
            else:
                evicted += 1
            parent = parents[victim]
            if parent != NO_PARENT:
                children[parent] -= 1
                if children[parent] == 0:
                    _set_candidate(parent, bits, lowest, candidate, classes, visited)
                    bucket = _age_bucket(bucket_starts, clock - visited[parent])
                    position_of_victim = min(position_of_victim, rank[classes[parent], bucket])
    return hit_blocks, hit_tokens, full_hits, evicted, rejected

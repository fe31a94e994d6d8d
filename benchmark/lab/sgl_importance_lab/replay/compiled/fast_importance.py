"""``importance`` on prefix trees, compiled: counts exactly what ``replay_tree(ImportanceReplayPolicy)`` does.

Blocks last visited by the same request lie on one path, and of a path at most one block is evictable. So
there is at most one candidate per request, ages are counted in requests, and the oldest candidate of a
class and age bucket is the first set bit of a range: no heap, and memory linear in blocks and requests (30
bytes for each unique block, the trace's 8 for its parent among them, and 3 for each access beside its 8).

The compiled code serves the requests between two computations of the retention index, which is the
server's own (``sgl_importance.reuse.hazards``). The index is computed outside of it, since numba's
cache of a function does not notice when a function of another module changes.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from sgl_importance.reuse.estimator import DECAY, REFRESH_INTERVAL
from sgl_importance.reuse.hazards import hazards, retention_index
from sgl_importance.reuse.life_table import NUM_AGE_BUCKETS, FloatArray
from sgl_importance.reuse.reached import AGES, AgeTable, IntervalArray, count_reached
from sgl_importance_lab.replay.cache import ReplayCounts
from sgl_importance_lab.replay.compiled.open_intervals import no_intervals
from sgl_importance_lab.replay.sessions import BlockFacts, access_classes
from sgl_importance_lab.replay.trace import NO_PARENT, IntArray, Trace

_BitArray = npt.NDArray[np.uint64]
_BoolArray = npt.NDArray[np.bool_]
_ClassArray = npt.NDArray[np.uint16]
_ClockArray = npt.NDArray[np.int32]


class _Requests(NamedTuple):
    """The trace that is replayed, as arrays."""

    blocks: IntArray
    offsets: IntArray
    parents: IntArray
    classes: _ClassArray  # of each access, those that occur numbered from 0
    is_evidence: _BoolArray  # of each access
    input_tokens: IntArray
    block_tokens: int
    capacity: int


class _Cache(NamedTuple):
    """Facts by block, and the candidates by the clock of their last visit."""

    resident: _BoolArray
    children: npt.NDArray[np.int32]
    visited: _ClockArray  # clock of the last visit, 0 before the first
    classes: _ClassArray
    at_risk: _BoolArray
    candidate: IntArray  # by clock
    bits: _BitArray  # by class: one for each clock with a candidate
    lowest: IntArray  # by class: no candidate is older


class _Evidence(NamedTuple):
    """As in ``ReuseEstimator``."""

    open_intervals: IntervalArray  # [ring of requests and ring of groups, classes]
    hits: FloatArray  # [classes, buckets]
    reached: FloatArray  # [classes, buckets]


class _Order(NamedTuple):
    """Cells (class x buckets + bucket) by retention index."""

    retention: FloatArray  # the index, [classes, buckets]
    cells: IntArray
    rank: IntArray  # first position of the cells with the same index, [classes, buckets]


_USED, _HIT_BLOCKS, _HIT_TOKENS, _FULL_HITS, _EVICTED, _REJECTED = range(6)


def replay_importance(trace: Trace, capacity: int, facts: BlockFacts | None = None) -> ReplayCounts:
    """Replays a prefix tree under ``importance`` with g = 1 and uniform cost.

    Args:
        trace: a trace with parents; ends of answers do not count (``fast_turns``).
        capacity: blocks that the cache can hold, at least 1.
        facts: ``block_facts(trace)``, where the caller has them.
    """
    counts, _ = _replay(trace, capacity, facts, log_rows=0)
    return ReplayCounts(*counts[_HIT_BLOCKS:].tolist())


def evictions(trace: Trace, capacity: int, facts: BlockFacts | None = None) -> IntArray:
    """The blocks that ``replay_importance`` evicts, in order.

    Returns:
        Clock, block, reuse class and age in requests; int64 [evictions, 4].
    """
    counts, log = _replay(trace, capacity, facts, log_rows=trace.num_accesses)
    return log[: counts[_EVICTED] + counts[_REJECTED]]


def _replay(
    trace: Trace, capacity: int, facts: BlockFacts | None, *, log_rows: int
) -> tuple[IntArray, IntArray]:
    assert trace.parents is not None
    assert capacity > 0
    found = access_classes(trace, facts)
    numbers, levels = found.numbers, found.levels
    requests = _Requests(
        trace.blocks,
        trace.offsets,
        trace.parents,
        found.classes,
        found.is_evidence,
        trace.input_tokens,
        trace.block_tokens,
        capacity,
    )
    num_requests, num_blocks, num_classes = trace.num_requests, trace.num_blocks, len(numbers)
    cache = _Cache(
        resident=np.zeros(num_blocks, dtype=np.bool_),
        children=np.zeros(num_blocks, dtype=np.int32),
        visited=np.zeros(num_blocks, dtype=np.int32),
        classes=np.zeros(num_blocks, dtype=np.uint16),
        at_risk=np.zeros(num_blocks, dtype=np.bool_),
        candidate=np.zeros(num_requests + 1, dtype=np.int64),
        bits=np.zeros((num_classes, (num_requests >> 6) + 1), dtype=np.uint64),
        lowest=np.full(num_classes, num_requests + 1, dtype=np.int64),
    )
    evidence = _Evidence(
        open_intervals=no_intervals(num_requests, num_classes),
        hits=np.zeros((num_classes, NUM_AGE_BUCKETS)),
        reached=np.zeros((num_classes, NUM_AGE_BUCKETS)),
    )
    counts = np.zeros(6, dtype=np.int64)
    log = np.zeros((log_rows, 4), dtype=np.int64)
    order = _ordered(evidence, levels)
    clock = 1
    while clock <= num_requests:
        count_reached(clock, evidence.open_intervals, evidence.reached, AGES)
        if clock % REFRESH_INTERVAL == 0:
            evidence.hits[:] *= DECAY
            evidence.reached[:] *= DECAY
            order = _ordered(evidence, levels)
        due = min(clock - clock % REFRESH_INTERVAL + REFRESH_INTERVAL, num_requests + 1)
        _serve(clock, due, requests, cache, evidence, order, AGES, counts, log)
        clock = due
    log[:, 2] = numbers[log[:, 2]] if num_classes else 0
    return counts, log


def _ordered(evidence: _Evidence, levels: IntArray) -> _Order:
    retention = retention_index(hazards(evidence.hits, evidence.reached, levels))
    cells = np.argsort(retention, axis=None)
    ranked = retention.ravel()[cells]
    firsts = np.arange(len(cells))
    firsts[1:][ranked[1:] == ranked[:-1]] = 0
    rank = np.empty_like(cells)
    rank[cells] = np.maximum.accumulate(firsts)
    return _Order(retention, cells, rank.reshape(retention.shape))


@numba.njit(cache=True)
def _age_bucket(ages: AgeTable, age: int) -> int:
    last = len(ages.bucket_of_age) - 1
    bucket = ages.bucket_of_age[min(age, last)]
    if age > last:
        while bucket + 1 < len(ages.bucket_starts) and ages.bucket_starts[bucket + 1] <= age:
            bucket += 1
    return int(bucket)


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
    block: int,
    bits: _BitArray,
    lowest: IntArray,
    candidate: IntArray,
    classes: _ClassArray,
    visited: _ClockArray,
) -> None:
    clock, row = visited[block], classes[block]
    candidate[clock] = block
    bits[row, clock >> 6] |= np.uint64(1) << np.uint64(clock & 63)
    lowest[row] = min(lowest[row], clock)


@numba.njit(cache=True)
def _clear_candidate(block: int, bits: _BitArray, classes: _ClassArray, visited: _ClockArray) -> None:
    clock = visited[block]
    bits[classes[block], clock >> 6] &= ~(np.uint64(1) << np.uint64(clock & 63))


@numba.njit(cache=True)
def _cheapest(
    clock: int,
    cells: IntArray,
    start: int,
    retention: FloatArray,
    bucket_starts: IntArray,
    bits: _BitArray,
    lowest: IntArray,
) -> tuple[int, int]:
    """Clock of the candidate that loses least, and the position of its cell; there is a candidate.

    Cells before position ``start`` hold none.
    """
    num_buckets = retention.shape[1]
    best = -1
    best_loss = np.inf
    best_position = start
    for position in range(start, len(cells)):
        cell = cells[position]
        row, bucket = cell // num_buckets, cell % num_buckets
        if lowest[row] > clock:
            continue
        loss = retention[row, bucket]
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
def _count_visit(
    clock: int, start: int, row: int, open_intervals: IntervalArray, hits: FloatArray, ages: AgeTable
) -> None:
    """An interval that began at clock ``start`` ends."""
    ring, exact = len(open_intervals) - ages.num_groups, len(ages.bucket_of_age)
    if clock - start < exact:
        open_intervals[start % ring, row] -= 1
    else:
        if clock - start < exact + (ages.num_groups - 1) * ages.group:
            open_intervals[ring + start // ages.group % ages.num_groups, row] -= 1
        start |= ages.group - 1
    hits[row, _age_bucket(ages, clock - start)] += 1.0


@numba.njit(cache=True)
def _serve(
    first_clock: int,
    end_clock: int,
    requests: _Requests,
    cache: _Cache,
    evidence: _Evidence,
    order: _Order,
    ages: AgeTable,
    counts: IntArray,
    log: IntArray,
) -> None:
    """Serves the requests of these clocks, of which the first is counted as admitted already."""
    blocks, offsets, parents, access_classes, is_evidence, input_tokens, block_tokens, capacity = requests
    resident, children, visited, classes, at_risk, candidate, bits, lowest = cache
    open_intervals, hits, reached = evidence
    retention, cells, rank = order
    ring = len(open_intervals) - ages.num_groups
    for clock in range(first_clock, end_clock):
        if clock > first_clock:
            count_reached(clock, open_intervals, reached, ages)
        first, length = offsets[clock - 1], offsets[clock] - offsets[clock - 1]
        hit = 0
        while hit < length and resident[blocks[first + hit]]:
            hit += 1
        counts[_HIT_BLOCKS] += hit
        counts[_HIT_TOKENS] += min(hit * block_tokens, input_tokens[clock - 1])
        if hit == length and length > 0:
            counts[_FULL_HITS] += 1
        if hit > 0 and children[blocks[first + hit - 1]] == 0:
            _clear_candidate(blocks[first + hit - 1], bits, classes, visited)
        for position in range(length):
            block = blocks[first + position]
            if position >= hit:
                resident[block] = True
                counts[_USED] += 1
                if position > 0:
                    children[blocks[first + position - 1]] += 1
            if at_risk[block]:
                _count_visit(clock, visited[block], classes[block], open_intervals, hits, ages)
            visited[block] = clock
            classes[block] = access_classes[first + position]
            at_risk[block] = is_evidence[first + position]
            if at_risk[block]:
                open_intervals[clock % ring, classes[block]] += 1
        if length > 0 and children[blocks[first + length - 1]] == 0:
            _set_candidate(blocks[first + length - 1], bits, lowest, candidate, classes, visited)

        remaining = length  # of the path, while the request's own blocks are given up from its end
        position_of_victim = 0
        while counts[_USED] > capacity:
            oldest, position_of_victim = _cheapest(
                clock, cells, position_of_victim, retention, ages.bucket_starts, bits, lowest
            )
            victim = candidate[oldest]
            _clear_candidate(victim, bits, classes, visited)
            resident[victim] = False
            counts[_USED] -= 1
            if len(log) > 0:
                row = log[counts[_EVICTED] + counts[_REJECTED]]
                row[0], row[1], row[2], row[3] = clock, victim, classes[victim], clock - oldest
            if oldest == clock:
                remaining -= 1
            if oldest == clock and remaining >= hit:
                counts[_REJECTED] += 1
            else:
                counts[_EVICTED] += 1
            parent = parents[victim]
            if parent != NO_PARENT:
                children[parent] -= 1
                if children[parent] == 0:
                    _set_candidate(parent, bits, lowest, candidate, classes, visited)
                    bucket = _age_bucket(ages, clock - visited[parent])
                    position_of_victim = min(position_of_victim, rank[classes[parent], bucket])

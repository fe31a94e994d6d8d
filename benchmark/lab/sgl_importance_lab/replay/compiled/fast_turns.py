"""``importance`` where turns rank blocks, compiled: counts exactly what
``replay_tree(TurnReplayPolicy)`` does.

As in ``fast_importance`` there is at most one candidate per request. Sessions that are alive are few, so the
victim is found by going through all candidates. What compiled functions call is repeated here, for numba's
cache's sake.
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
from sgl_importance.reuse.turns import Classify, turn_class
from sgl_importance_lab.replay.cache import ReplayCounts
from sgl_importance_lab.replay.compiled.open_intervals import no_intervals
from sgl_importance_lab.replay.sessions import BlockFacts, block_facts
from sgl_importance_lab.replay.trace import NO_PARENT, IntArray, Trace
from sgl_importance_lab.replay.trace_turns import GONE_ON, OVER, TraceTurns

_BoolArray = npt.NDArray[np.bool_]


class _Requests(NamedTuple):
    """The trace that is replayed, as arrays; and constants, which numba would freeze into its cache."""

    blocks: IntArray
    offsets: IntArray
    parents: IntArray
    classes: IntArray  # of each access, those that occur numbered from 0
    is_evidence: _BoolArray  # of each access
    is_shared: _BoolArray  # of each access
    input_tokens: IntArray
    ranks: _BoolArray  # of each request, whether its turn ranks blocks
    seconds: FloatArray
    block_tokens: int
    capacity: int
    ages: AgeTable
    gone_on: int
    over: int


class _Cache(NamedTuple):
    """Facts by block, and the candidates."""

    resident: _BoolArray
    children: npt.NDArray[np.int32]
    visited: IntArray  # clock of the last visit, 0 before the first
    classes: IntArray
    at_risk: _BoolArray
    is_shared: _BoolArray
    candidate: IntArray  # block, by clock
    place: IntArray  # in ``clocks``, by clock
    clocks: IntArray  # of the candidates, in no order; as many as _CANDIDATES counts
    losses: FloatArray  # of the same candidates


class _Estimate(NamedTuple):
    """Evidence and index of classes and turns."""

    open_intervals: IntervalArray
    hits: FloatArray  # [classes, buckets]
    class_index: FloatArray  # [classes, buckets]
    turn_index: FloatArray  # [turn classes, buckets]
    turn_classes: IntArray  # by request
    turn_since: FloatArray  # by request
    seconds_per_request: float


_USED, _HIT_BLOCKS, _HIT_TOKENS, _FULL_HITS, _EVICTED, _REJECTED, _CANDIDATES = range(7)


def replay_turns(
    trace: Trace, capacity: int, facts: BlockFacts | None = None, classify: Classify = turn_class
) -> ReplayCounts:
    """Replays a prefix tree under ``importance`` with g = 1 and uniform cost, ranked by turns.

    Args:
        trace: a trace with parents.
        capacity: blocks that the cache can hold, at least 1.
        facts: ``block_facts(trace)``, where the caller has them.
        classify: as in ``TurnEstimator``.
    """
    facts = facts if facts is not None else block_facts(trace)
    return replay_estimated(trace, capacity, facts, TraceTurns(trace, facts, classify))


def replay_estimated(trace: Trace, capacity: int, facts: BlockFacts, turns: TraceTurns) -> ReplayCounts:
    """``replay_turns`` with turns that somebody else estimates; they are used up."""
    assert trace.parents is not None
    assert capacity > 0
    numbers, first_uses, classes = np.unique(facts.reuse_classes, return_index=True, return_inverse=True)
    levels = facts.visit_levels[first_uses]
    requests = _Requests(
        trace.blocks,
        trace.offsets,
        trace.parents,
        classes.astype(np.int64),
        facts.is_evidence,
        turns.is_shared,
        trace.input_tokens,
        turns.ranks,
        trace.seconds,
        trace.block_tokens,
        capacity,
        AGES,
        GONE_ON,
        OVER,
    )
    num_requests, num_blocks = trace.num_requests, trace.num_blocks
    cache = _Cache(
        resident=np.zeros(num_blocks, dtype=np.bool_),
        children=np.zeros(num_blocks, dtype=np.int32),
        visited=np.zeros(num_blocks, dtype=np.int64),
        classes=np.zeros(num_blocks, dtype=np.int64),
        at_risk=np.zeros(num_blocks, dtype=np.bool_),
        is_shared=np.zeros(num_blocks, dtype=np.bool_),
        candidate=np.zeros(num_requests + 1, dtype=np.int64),
        place=np.zeros(num_requests + 1, dtype=np.int64),
        clocks=np.zeros(num_requests + 1, dtype=np.int64),
        losses=np.zeros(num_requests + 1),
    )
    open_intervals = no_intervals(num_requests, len(numbers))
    hits, reached = np.zeros((2, len(numbers), NUM_AGE_BUCKETS))
    index = retention_index(hazards(hits, reached, levels))
    counts = np.zeros(7, dtype=np.int64)
    for clock in range(1, num_requests + 1):
        count_reached(clock, open_intervals, reached, AGES)
        if clock % REFRESH_INTERVAL == 0:
            hits *= DECAY
            reached *= DECAY
            index = retention_index(hazards(hits, reached, levels))
        turns.begin_request(clock - 1)
        estimate = _Estimate(
            open_intervals,
            hits,
            index,
            turns.estimator.index,
            turns.classes,
            turns.since,
            turns.estimator.seconds_per_request,
        )
        _serve(clock, requests, cache, estimate, counts)
    return ReplayCounts(*counts[_HIT_BLOCKS:_CANDIDATES].tolist())


@numba.njit(cache=True)
def _age_bucket(ages: AgeTable, age: int) -> int:
    last = len(ages.bucket_of_age) - 1
    bucket = ages.bucket_of_age[min(age, last)]
    if age > last:
        while bucket + 1 < len(ages.bucket_starts) and ages.bucket_starts[bucket + 1] <= age:
            bucket += 1
    return int(bucket)


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
def _set_candidate(clock: int, block: int, cache: _Cache, counts: IntArray) -> None:
    cache.candidate[clock] = block
    cache.place[clock] = counts[_CANDIDATES]
    cache.clocks[counts[_CANDIDATES]] = clock
    counts[_CANDIDATES] += 1


@numba.njit(cache=True)
def _clear_candidate(clock: int, cache: _Cache, counts: IntArray) -> None:
    counts[_CANDIDATES] -= 1
    place, last = cache.place[clock], counts[_CANDIDATES]
    cache.clocks[place], cache.losses[place] = cache.clocks[last], cache.losses[last]
    cache.place[cache.clocks[place]] = place


@numba.njit(cache=True)
def _loss(clock: int, visited: int, requests: _Requests, cache: _Cache, estimate: _Estimate) -> float:
    """Of the candidate that was last visited at this clock."""
    block = cache.candidate[visited]
    turn_class = estimate.turn_classes[visited - 1]
    if turn_class == requests.over:
        return 0.0
    if cache.is_shared[block] or not requests.ranks[visited - 1]:
        bucket = _age_bucket(requests.ages, clock - visited)
        return float(estimate.class_index[cache.classes[block], bucket])
    if turn_class == requests.gone_on:
        return 0.0
    age = int(requests.seconds[clock - 1] - estimate.turn_since[visited - 1])
    bucket = min(_age_bucket(requests.ages, age), estimate.turn_index.shape[1] - 1)
    return float(estimate.turn_index[turn_class, bucket] * estimate.seconds_per_request)


@numba.njit(cache=True)
def _serve(clock: int, requests: _Requests, cache: _Cache, estimate: _Estimate, counts: IntArray) -> None:
    """Serves the request of this clock, which is counted as admitted already."""
    blocks, resident, children, visited = requests.blocks, cache.resident, cache.children, cache.visited
    classes, at_risk = cache.classes, cache.at_risk
    open_intervals, ages = estimate.open_intervals, requests.ages
    ring = len(open_intervals) - ages.num_groups
    first, end = requests.offsets[clock - 1], requests.offsets[clock]
    hit = first
    while hit < end and resident[blocks[hit]]:
        hit += 1
    counts[_HIT_BLOCKS] += hit - first
    counts[_HIT_TOKENS] += min((hit - first) * requests.block_tokens, requests.input_tokens[clock - 1])
    if hit == end and end > first:
        counts[_FULL_HITS] += 1
    if hit > first and children[blocks[hit - 1]] == 0:
        _clear_candidate(visited[blocks[hit - 1]], cache, counts)
    for i in range(first, end):
        block = blocks[i]
        if i >= hit:
            resident[block] = True
            counts[_USED] += 1
            if i > first:
                children[blocks[i - 1]] += 1
        if at_risk[block]:
            _count_visit(clock, visited[block], classes[block], open_intervals, estimate.hits, ages)
        visited[block] = clock
        classes[block] = requests.classes[i]
        at_risk[block] = requests.is_evidence[i]
        cache.is_shared[block] = requests.is_shared[i]
        if at_risk[block]:
            open_intervals[clock % ring, classes[block]] += 1
    if end > first and children[blocks[end - 1]] == 0:
        _set_candidate(clock, blocks[end - 1], cache, counts)
    if counts[_USED] <= requests.capacity:
        return

    for place in range(counts[_CANDIDATES]):
        cache.losses[place] = _loss(clock, cache.clocks[place], requests, cache, estimate)
    remaining = end  # of the path, while the request's own blocks are given up from its end
    while counts[_USED] > requests.capacity:
        best = 0
        for place in range(1, counts[_CANDIDATES]):
            loss, least = cache.losses[place], cache.losses[best]
            if loss < least or (loss == least and cache.clocks[place] < cache.clocks[best]):
                best = place
        oldest = cache.clocks[best]
        victim = cache.candidate[oldest]
        _clear_candidate(oldest, cache, counts)
        resident[victim] = False
        counts[_USED] -= 1
        if oldest == clock:
            remaining -= 1
        counts[_REJECTED if oldest == clock and remaining >= hit else _EVICTED] += 1
        parent = requests.parents[victim]
        if parent != NO_PARENT:
            children[parent] -= 1
            if children[parent] == 0:
                _set_candidate(visited[parent], parent, cache, counts)
                place = counts[_CANDIDATES] - 1
                cache.losses[place] = _loss(clock, visited[parent], requests, cache, estimate)

"""The compiled path of ``importance`` counts exactly what the server's own object does."""

from __future__ import annotations

import random
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.reuse.estimator import DECAY, REFRESH_INTERVAL, ReuseEstimator
from sgl_importance.reuse.life_table import (
    BUCKET_STARTS,
    EXACT_AGE,
    GROUP,
    MAX_AGE,
    NUM_AGE_BUCKETS,
    NUM_EXACT_BUCKETS,
    age_bucket,
)
from sgl_importance_lab.policies.lru import LruPolicy
from sgl_importance_lab.replay.cache import replay_tree
from sgl_importance_lab.replay.compiled import fast_importance, fast_turns
from sgl_importance_lab.replay.compiled.fast_importance import evictions, replay_importance
from sgl_importance_lab.replay.importance_replay import ImportanceReplayPolicy
from sgl_importance_lab.replay.trace import Trace, TraceBuilder

from support.workloads.replay_traces import build_trace

BLOCK = 16


def random_trace(seeds: list[tuple[int, int, int]]) -> Trace:
    """Sessions that grow, branch and repeat: (session, how far to follow it, new blocks)."""
    builder = TraceBuilder("random", BLOCK)
    sessions: list[list[int]] = [[0]]
    fresh = 1
    for which, follow, new in seeds:
        base = sessions[which % len(sessions)]
        path = base[: 1 + follow % len(base)] + list(range(fresh, fresh + new))
        fresh += new
        sessions.append(path)
        partial = BLOCK // 2 if which % 3 == 0 else 0
        builder.add(path, input_tokens=len(path) * BLOCK - partial, output_tokens=(which % 4) * BLOCK)
    return builder.build()


_requests = st.tuples(st.integers(0, 200), st.integers(0, 30), st.integers(0, 8))


class Noting(ImportanceReplayPolicy):
    """Notes clock, block, class and age of every victim."""

    def __init__(self, capacity: int, trace: Trace) -> None:
        super().__init__(capacity, trace)
        self.evicted: list[list[int]] = []

    def victim(self) -> int:
        block = super().victim()
        node, clock = self.nodes[block], self.nodes.policy.clock
        self.evicted.append([clock, block, node.reuse_class, clock - node.last_access])
        return block


@settings(max_examples=60, deadline=None)
@given(st.lists(_requests, min_size=1, max_size=150), st.integers(1, 60))
def test_both_evict_the_same_blocks_of_the_same_classes_and_ages(
    seeds: list[tuple[int, int, int]], capacity: int
):
    trace = random_trace(seeds)
    trace.check_integrity()
    readable = Noting(capacity, trace)
    assert replay_importance(trace, capacity) == replay_tree(trace, readable)
    assert evictions(trace, capacity).tolist() == readable.evicted


@pytest.mark.parametrize("compiled", [fast_importance, fast_turns])
def test_intervals_of_every_age_are_counted_as_the_estimator_counts_them(compiled: ModuleType):
    """Longer than the traces above are: a few thousand intervals, and some that were given up long ago."""
    rng = random.Random(0)
    reuse, clock = ReuseEstimator(), 3 * MAX_AGE + 5
    reuse.restore(*reuse.counts(), clock)
    opened = fast_importance.no_intervals(clock, 2)
    hits, reached = np.zeros((2, 2, NUM_AGE_BUCKETS))
    intervals: list[tuple[int, int]] = []
    for number in range(EXACT_AGE + 12 * GROUP):
        clock = reuse.tick()
        fast_importance.count_reached(clock, opened, reached, fast_importance.AGES)
        if clock % REFRESH_INTERVAL == 0:
            hits *= DECAY
            reached *= DECAY
        if number % 5 == 0:
            row = rng.randrange(2)
            reuse.began(row)
            opened[clock % EXACT_AGE, row] += 1
            intervals.append((clock, row))
        if number % 16 == 0:
            given_up = (clock - MAX_AGE - rng.randrange(GROUP), 0)
            for start, row in (given_up, intervals.pop(rng.randrange(len(intervals)))):
                reuse.hit(row, start)
                compiled._count_visit(clock, start, row, opened, hits, fast_importance.AGES)
    found = {(row, class_): int(opened[row, class_]) for row, class_ in np.argwhere(opened).tolist()}
    assert reuse.open_intervals() == found
    assert any(row >= EXACT_AGE for row, _ in found)
    np.testing.assert_array_equal([table[:2] for table in reuse.counts()], (hits, reached))
    assert (hits[:, NUM_EXACT_BUCKETS] > 0).all()
    assert (reached[:, NUM_EXACT_BUCKETS : NUM_EXACT_BUCKETS + 2] > 0).all()


@pytest.mark.parametrize("compiled", [fast_importance, fast_turns])
def test_buckets_of_every_age_are_those_of_the_life_table(compiled: ModuleType):
    for first in [0, *BUCKET_STARTS.tolist(), MAX_AGE, 3 * MAX_AGE]:
        for age in (first, first + 1, max(first - 1, 0)):
            assert compiled._age_bucket(fast_importance.AGES, age) == age_bucket(age)


def test_documents_that_are_asked_again_survive_a_scan():
    """Two documents of 20 blocks, asked in turn every 20 requests among one-off prompts of 76 blocks."""
    builder = TraceBuilder("scan", BLOCK)
    fresh = 1000
    for step in range(4000):
        if step % 20 == 0:
            document = step // 20 % 2
            path = [0, *range(100 * (document + 1), 100 * (document + 1) + 20), fresh]
        else:
            path = [0, *range(fresh, fresh + 4)]
        fresh += 4
        builder.add(path, input_tokens=len(path) * BLOCK)
    trace = builder.build()
    recency = replay_tree(trace, LruPolicy(60)).hit_blocks
    assert recency < trace.num_requests + 100, "recency keeps the common first block, and no document"
    assert replay_importance(trace, 60).hit_blocks > trace.num_requests + 0.9 * 20 * trace.num_requests / 20


def test_blocks_that_are_all_popular_are_told_apart():
    """Steady popularity, as of shared documents: the best that can be done is to keep the most popular."""
    rng, capacity, requests = random.Random(0), 8, 4000
    popularity = [(rank + 1) ** -0.8 for rank in range(24)]
    asked = rng.choices(range(len(popularity)), popularity, k=requests)
    hits = replay_importance(build_trace([[document] for document in asked]), capacity).hit_blocks
    best = sum(popularity[:capacity]) / sum(popularity)
    assert hits / requests > 0.88 * best

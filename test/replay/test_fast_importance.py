"""The compiled path of ``importance`` counts exactly what the server's own object does."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.policy.lru import LruPolicy
from sgl_importance.replay.cache import replay_tree
from sgl_importance.replay.fast_importance import evictions, replay_importance
from sgl_importance.replay.importance_replay import ImportanceReplayPolicy
from sgl_importance.replay.trace import Trace, TraceBuilder
from sgl_importance.reuse.life_table import EXACT_AGE, GROUP, NUM_EXACT_BUCKETS

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


def test_both_count_intervals_alike_that_are_older_than_the_ring_of_requests():
    """Most requests are for one block; the others ask for documents that come back in a day or two."""
    rng = random.Random(0)
    requests, documents = EXACT_AGE + 20 * GROUP, 400
    asked = [rng.randrange(1, documents) if step % 64 == 0 else 0 for step in range(requests)]
    trace, capacity = build_trace([[each] for each in asked]), documents // 2
    readable = Noting(capacity, trace)
    assert replay_importance(trace, capacity) == replay_tree(trace, readable)
    assert evictions(trace, capacity).tolist() == readable.evicted
    old = [age for _, _, _, age in readable.evicted if age > EXACT_AGE]
    assert len(old) > 20
    hits, reached = readable.nodes.policy.reuse.counts()
    assert hits[:, NUM_EXACT_BUCKETS:].sum() > 1
    assert reached[:, NUM_EXACT_BUCKETS:].sum() > 10


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

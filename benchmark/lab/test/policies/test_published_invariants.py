"""What holds for every published policy on random prefix trees and random objects."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance_lab.policies.arc import ArcPolicy
from sgl_importance_lab.policies.base import EvictionPolicy
from sgl_importance_lab.policies.belady import NextUses
from sgl_importance_lab.policies.gdsf import GdsfPolicy
from sgl_importance_lab.policies.lhd import LhdPolicy
from sgl_importance_lab.policies.random import RandomPolicy
from sgl_importance_lab.replay.cache import replay_objects, replay_tree
from sgl_importance_lab.replay.trace import NO_PARENT, Trace

from support.drivers.published import ONLINE, Watched, belady, object_hits, object_trace, tree_trace

Policy = Callable[[int], EvictionPolicy]

paths = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=60)
objects = st.lists(st.integers(0, 11), min_size=1, max_size=150)
capacities = st.integers(1, 14)
every_policy = pytest.mark.parametrize("policy", ONLINE, ids=lambda policy: policy.name)


@every_policy
@settings(max_examples=60, deadline=None)
@given(paths=paths, capacity=capacities)
def test_tree_victims_are_leaves_and_the_optimum_is_no_worse(
    policy: Policy, paths: list[list[int]], capacity: int
) -> None:
    trace = tree_trace(paths)
    watched = Watched(policy(capacity))
    counts = replay_tree(trace, watched)
    assert len(watched.resident) <= capacity
    assert counts.hit_blocks <= replay_tree(trace, Watched(belady(trace)(capacity))).hit_blocks


@every_policy
@settings(max_examples=60, deadline=None)
@given(accesses=objects, capacity=capacities)
def test_object_victims_are_resident_and_the_optimum_is_no_worse(
    policy: Policy, accesses: list[int], capacity: int
) -> None:
    trace = object_trace(accesses)
    watched = Watched(policy(capacity))
    counts = replay_objects(trace, watched)
    assert len(watched.resident) <= capacity
    assert counts.hit_blocks <= replay_objects(trace, belady(trace)(capacity)).hit_blocks


@every_policy
@settings(max_examples=20, deadline=None)
@given(paths=paths, capacity=capacities)
def test_objects_may_be_asked_for_several_at_a_time(
    policy: Policy, paths: list[list[int]], capacity: int
) -> None:
    trace = tree_trace(paths)
    watched = Watched(policy(capacity))
    counts = replay_objects(trace, watched)
    assert len(watched.resident) <= capacity
    assert len(watched.victims) == counts.evicted_blocks + counts.rejected_blocks


@every_policy
@settings(max_examples=20, deadline=None)
@given(paths=paths, capacity=capacities)
def test_the_same_events_lead_to_the_same_victims(
    policy: Policy, paths: list[list[int]], capacity: int
) -> None:
    trace = tree_trace(paths)
    first, second = Watched(policy(capacity)), Watched(policy(capacity))
    assert replay_tree(trace, first) == replay_tree(trace, second)
    assert first.victims == second.victims


@every_policy
@settings(max_examples=20, deadline=None)
@given(paths=paths)
def test_a_cache_that_holds_everything_evicts_nothing(policy: Policy, paths: list[list[int]]) -> None:
    trace = tree_trace(paths)
    watched = Watched(policy(max(trace.num_blocks, 1)))
    counts = replay_tree(trace, watched)
    assert watched.victims == []
    assert counts.hit_blocks == trace.num_accesses - trace.num_blocks


@every_policy
def test_a_prefix_outlives_what_follows_it(policy: Policy) -> None:
    trace = tree_trace([[1], [1, 1], [1, 1, 1], [2], [3], [4]])
    watched = Watched(policy(4))
    replay_tree(trace, watched)
    order = [block for block in watched.victims if block < 3]
    assert order == sorted(order, reverse=True)


def most_tree_hits(trace: Trace, capacity: int) -> int:
    """Hit blocks of the best of all eviction decisions, by trying them all."""
    assert trace.parents is not None
    parents = trace.parents.tolist()

    def closed(blocks: frozenset[int]) -> bool:
        return all(parents[block] == NO_PARENT or parents[block] in blocks for block in blocks)

    best = {frozenset[int](): 0}
    for index in range(trace.num_requests):
        path = trace.request(index).tolist()
        after: dict[frozenset[int], int] = {}
        for resident, hits in best.items():
            prefix = next((i for i, block in enumerate(path) if block not in resident), len(path))
            everything = resident | set(path)
            for kept in combinations(sorted(everything), min(capacity, len(everything))):
                if closed(frozenset(kept)):
                    state = frozenset(kept)
                    after[state] = max(after.get(state, 0), hits + prefix)
        best = after
    return max(best.values())


def most_object_hits(accesses: list[int], capacity: int) -> int:
    best = {frozenset[int](): 0}
    for block in accesses:
        after: dict[frozenset[int], int] = {}
        for resident, hits in best.items():
            if block in resident or len(resident) < capacity:
                nexts = [resident | {block}]
            else:
                nexts = [resident - {victim} | {block} for victim in resident]
            for state in nexts:
                after[state] = max(after.get(state, 0), hits + (block in resident))
        best = after
    return max(best.values())


@settings(max_examples=60, deadline=None)
@given(
    paths=st.lists(st.lists(st.integers(0, 1), max_size=3), min_size=1, max_size=9),
    capacity=st.integers(1, 4),
)
def test_belady_is_the_best_of_all_leaf_only_evictions(paths: list[list[int]], capacity: int) -> None:
    trace = tree_trace(paths)
    assert replay_tree(trace, belady(trace)(capacity)).hit_blocks == most_tree_hits(trace, capacity)


@settings(max_examples=60, deadline=None)
@given(accesses=st.lists(st.integers(0, 5), min_size=1, max_size=14), capacity=st.integers(1, 3))
def test_belady_is_the_best_of_all_object_evictions(accesses: list[int], capacity: int) -> None:
    trace = object_trace(accesses)
    hits = object_hits(belady(trace)(capacity), trace)
    assert hits.sum() == most_object_hits(accesses, capacity)


@given(paths=paths)
def test_next_uses_are_those_of_a_walk_from_the_end(paths: list[list[int]]) -> None:
    trace = tree_trace(paths)
    expected, later = [], {}
    for position in range(trace.num_accesses - 1, -1, -1):
        block = int(trace.blocks[position])
        expected.append(later.get(block, trace.num_accesses))
        later[block] = position
    assert NextUses.of(trace.blocks, trace.offsets).positions.tolist() == expected[::-1]


@every_policy
def test_memory_does_not_grow_with_the_trace(policy: Policy) -> None:
    """Queues and heaps drop stale items: a leaf that is asked for again and again leaves no trail."""
    kept = policy(8)
    hot = Watched(kept)
    trace = tree_trace([[1], [2], [3]] * 1_000)
    replay_tree(trace, hot)
    heaps = [
        len(holder._heap)
        for attribute in vars(kept).values()
        for holder in (attribute if isinstance(attribute, list) else [attribute])
        if hasattr(holder, "_heap")
    ]
    assert max(heaps, default=0) < 200


@settings(max_examples=60, deadline=None)
@given(paths=paths, capacity=capacities)
def test_arc_remembers_no_more_than_it_may(paths: list[list[int]], capacity: int) -> None:
    policy = ArcPolicy(capacity)
    replay_tree(tree_trace(paths), policy)
    recent, frequent = len(policy._recent), len(policy._frequent)
    evicted_recent, evicted_frequent = len(policy._evicted_recent), len(policy._evicted_frequent)
    assert recent + evicted_recent <= capacity
    assert recent + frequent + evicted_recent + evicted_frequent <= 2 * capacity


@settings(max_examples=60, deadline=None)
@given(paths=paths, capacity=capacities)
def test_gdsf_inflation_never_falls(paths: list[list[int]], capacity: int) -> None:
    class Ageing(Watched):
        inflation = 0

        def victim(self) -> int:
            victim = super().victim()
            assert isinstance(self.policy, GdsfPolicy)
            assert self.policy._inflation >= self.inflation
            self.inflation = self.policy._inflation
            return victim

    replay_tree(tree_trace(paths), Ageing(GdsfPolicy(capacity)))


def test_random_and_lhd_depend_on_their_seed() -> None:
    accesses = np.random.default_rng(0).integers(0, 200, 3_000).tolist()
    trace = object_trace(accesses)
    for policy in (RandomPolicy, LhdPolicy):
        runs = []
        for seed in (1, 1, 2):
            watched = Watched(policy(40, seed=seed))
            replay_objects(trace, watched)
            runs.append(watched.victims)
        assert runs[0] == runs[1]
        assert runs[0] != runs[2]

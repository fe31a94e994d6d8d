"""What must hold of every policy in the readable caches, and the optimum's claim to be one."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance_lab.policies.base import EvictionPolicy
from sgl_importance_lab.policies.lru import LruPolicy
from sgl_importance_lab.replay.cache import ReplayCounts, replay_objects, replay_tree
from sgl_importance_lab.replay.formats.detect import read_trace
from sgl_importance_lab.replay.policy_registry import (
    POLICY_NAMES,
    UnknownPolicyError,
    create_policy,
    load_policy,
)
from sgl_importance_lab.replay.trace import Trace

from support.workloads.replay_traces import build_trace, object_traces, shared_data, tree_traces

capacities = st.integers(1, 12)


def _full_replay(trace: Trace) -> ReplayCounts:
    """A cache that never evicts."""
    return replay_tree(trace, LruPolicy(max(trace.num_blocks, 1)))


@cache
def _most_hits(trace_paths: tuple[tuple[int, ...], ...], capacity: int) -> int:
    """Best over all choices of what to keep after each request, by exhaustion."""
    trace = build_trace([list(path) for path in trace_paths])
    requests = [tuple(trace.request(index).tolist()) for index in range(trace.num_requests)]
    assert trace.parents is not None
    parents = trace.parents.tolist()
    best = {frozenset[int](): 0}
    for path in requests:
        following: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            gained = next((i for i, block in enumerate(path) if block not in kept), len(path))
            for smaller in _trimmed(kept | set(path), parents, capacity):
                following[smaller] = max(following.get(smaller, 0), hits + gained)
        best = following
    return max(best.values())


def _trimmed(kept: frozenset[int], parents: list[int], capacity: int) -> set[frozenset[int]]:
    """Everything that evicting leaves one by one can leave behind, once the cache fits."""
    if len(kept) <= capacity:
        return {kept}
    leaves = kept - {parents[block] for block in kept}
    return {result for leaf in leaves for result in _trimmed(kept - {leaf}, parents, capacity)}


@pytest.mark.parametrize("name", POLICY_NAMES)
@settings(max_examples=30)
@given(trace=tree_traces, capacity=capacities)
def test_no_policy_beats_the_optimum(name: str, trace: Trace, capacity: int) -> None:
    counts = replay_tree(trace, create_policy(name, capacity, trace))
    assert counts.hit_blocks <= replay_tree(trace, create_policy("belady", capacity, trace)).hit_blocks
    kept = trace.num_accesses - counts.hit_blocks - counts.evicted_blocks - counts.rejected_blocks
    assert 0 <= kept <= capacity


@pytest.mark.parametrize("name", POLICY_NAMES)
@settings(max_examples=30)
@given(trace=object_traces, capacity=capacities)
def test_no_policy_beats_the_optimum_on_objects(name: str, trace: Trace, capacity: int) -> None:
    counts = replay_objects(trace, create_policy(name, capacity, trace))
    assert counts.hit_blocks <= replay_objects(trace, create_policy("belady", capacity, trace)).hit_blocks
    kept = trace.num_accesses - counts.hit_blocks - counts.evicted_blocks
    assert kept == min(capacity, trace.num_blocks)


@pytest.mark.parametrize("name", POLICY_NAMES)
@settings(max_examples=20)
@given(trace=tree_traces)
def test_a_cache_that_holds_everything_makes_policies_equal(name: str, trace: Trace) -> None:
    policy = create_policy(name, max(trace.num_blocks, 1), trace)
    assert replay_tree(trace, policy) == _full_replay(trace)


@pytest.mark.parametrize("name", ["lru", "belady"])
@settings(max_examples=50)
@given(trace=tree_traces)
def test_stack_algorithms_gain_with_capacity(name: str, trace: Trace) -> None:
    hits = [replay_tree(trace, create_policy(name, size, trace)).hit_blocks for size in range(1, 12)]
    assert hits == sorted(hits)


@settings(max_examples=60, deadline=None)
@given(
    paths=st.lists(st.lists(st.integers(0, 1), max_size=3), min_size=1, max_size=7),
    capacity=st.integers(1, 4),
)
def test_furthest_next_use_is_the_optimum(paths: list[list[int]], capacity: int) -> None:
    trace = build_trace(paths)
    hits = replay_tree(trace, create_policy("belady", capacity, trace)).hit_blocks
    assert hits == _most_hits(tuple(map(tuple, paths)), capacity)


def test_published_optimum() -> None:
    trace = read_trace(shared_data("traces/mooncake_conversation.jsonl"))
    for fraction, block_hit_rate in ((0.01, 0.246), (0.02, 0.314), (0.05, 0.366)):
        capacity = int(fraction * trace.num_blocks)
        hits = replay_tree(trace, create_policy("belady", capacity, trace)).hit_blocks
        assert round(hits / trace.num_accesses, 3) == block_hit_rate


class _Recorder(LruPolicy):
    """Checks the life of a block as policies are promised it."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.state: dict[int, str] = {}

    def miss(self, block: int) -> None:
        assert block not in self.state

    def insert(self, block: int) -> None:
        assert block not in self.state
        self.state[block] = "held"
        super().insert(block)

    def access(self, block: int) -> None:
        assert block in self.state
        super().access(block)

    def evictable(self, block: int) -> None:
        assert self.state[block] == "held"
        self.state[block] = "evictable"
        super().evictable(block)

    def held(self, block: int) -> None:
        assert self.state[block] == "evictable"
        self.state[block] = "held"
        super().held(block)

    def victim(self) -> int:
        block = super().victim()
        assert self.state.pop(block) == "evictable"
        return block


@given(tree_traces, capacities)
def test_events_follow_the_life_of_a_block(trace: Trace, capacity: int) -> None:
    replay_tree(trace, _Recorder(capacity))


@given(object_traces, capacities)
def test_events_follow_the_life_of_an_object(trace: Trace, capacity: int) -> None:
    replay_objects(trace, _Recorder(capacity))


def test_unknown_policy_is_named_with_those_that_exist() -> None:
    with pytest.raises(UnknownPolicyError, match=r"unknown policy 'lfru'; known: .*lru.*belady"):
        load_policy("lfru")


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_registered_name_is_the_class_name(name: str) -> None:
    policy = load_policy(name)
    assert issubclass(policy, EvictionPolicy)
    assert policy.name == name
    assert find_spec(policy.__module__) is not None

"""Node-granular replay by hand, against single blocks, and the integrity of its tree."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.reuse.reuse_class import BlockType
from sgl_importance_lab.policies.lru import LruPolicy
from sgl_importance_lab.replay.cache import replay_tree
from sgl_importance_lab.replay.policy_registry import IMPORTANCE, POLICY_NAMES, create_policy
from sgl_importance_lab.replay.radix_nodes import RadixTree, mean_node_blocks, replay_nodes
from sgl_importance_lab.replay.replay_runner import Job, ReplayMode, choose_replay, run_job
from sgl_importance_lab.replay.sessions import block_facts
from sgl_importance_lab.replay.trace import Trace

from support.workloads.replay_traces import build_trace, tree_traces


@pytest.mark.parametrize("name", [name for name in POLICY_NAMES if name not in ("lru", IMPORTANCE)])
@settings(max_examples=20, deadline=None)
@given(trace=tree_traces, capacity=st.integers(1, 20))
def test_every_policy_ranks_nodes(name: str, trace: Trace, capacity: int) -> None:
    counts = choose_replay(name, ReplayMode.NODES)(trace, capacity)
    computed = trace.num_accesses - counts.refused_blocks - counts.hit_blocks
    kept = computed - counts.evicted_blocks - counts.rejected_blocks
    assert 0 <= kept <= capacity
    optimum = replay_tree(trace, create_policy("belady", capacity, trace))
    assert counts.hit_blocks <= optimum.hit_blocks


@pytest.mark.parametrize("name", [name for name in POLICY_NAMES if name != IMPORTANCE])
def test_a_node_that_is_cut_where_an_evicted_one_ended_is_remembered_no_more(name: str) -> None:
    """What a policy remembers as evicted is not in the cache."""
    paths = ["001", "000013", "21331", "0000131", "000013", "000013", "2", "22", "02", "2313", "33", "0"]
    trace = build_trace([[int(each) for each in path] for path in paths])
    for nodes in range(1, 5):
        replay_nodes(trace, create_policy(name, nodes, trace), 11)


class Told(LruPolicy):
    """Asserts that it is told of each block that comes what the interface says."""

    missed: int | None = None

    def miss(self, block: int) -> None:
        assert block not in self._ranks
        self.missed = block

    def insert(self, block: int) -> None:
        assert block == self.missed
        self.missed = None
        super().insert(block)


@given(tree_traces, st.integers(1, 12))
def test_what_comes_was_missed(trace: Trace, capacity: int) -> None:
    replay_nodes(trace, Told(capacity), capacity)


@given(tree_traces)
def test_a_cache_that_holds_everything_hits_as_single_blocks_do(trace: Trace) -> None:
    capacity = max(trace.num_blocks, 1)
    assert replay_nodes(trace, LruPolicy(capacity), capacity) == replay_tree(trace, LruPolicy(capacity))


@given(tree_traces, st.integers(1, 12))
def test_tree_stays_whole(trace: Trace, capacity: int) -> None:
    tree = RadixTree(LruPolicy(capacity))
    for index in range(trace.num_requests):
        path = trace.request(index).tolist()
        node, matched = tree.match(path)
        tree.release(tree.extend(node, path, matched))
        while tree.used > capacity:
            tree.evict()
        tree.check_integrity()


def test_a_leaf_goes_whole() -> None:
    """Block by block, the first of the three would survive; as a node, all or nothing."""
    trace = build_trace([[1, 1, 1], [2, 2], [1, 1, 1]])
    assert replay_tree(trace, LruPolicy(4)).hit_blocks == 2
    assert replay_nodes(trace, LruPolicy(4), 4).hit_blocks == 0


def test_divergence_splits_a_node() -> None:
    """The shared start survives as a node of its own when the older tail is evicted."""
    trace = build_trace([[1, 1, 1, 1], [1, 1, 2], [3], [1, 1, 1, 1], [1, 1, 2]])
    counts = replay_nodes(trace, LruPolicy(5), 5)
    # Hits: none, the start, none (which evicts the first tail), the start (and the second tail), the start.
    assert counts.hit_blocks == 6


def test_a_request_longer_than_the_cache_is_refused() -> None:
    trace = build_trace([[1, 1], [1, 1, 1], [1, 1]])
    counts = replay_nodes(trace, LruPolicy(2), 2)
    assert (counts.refused_requests, counts.refused_blocks, counts.refused_tokens) == (1, 3, 3 * 4)
    assert (counts.hit_blocks, counts.evicted_blocks) == (2, 0)
    row = run_job([trace], Job(0, "fifo", 2, ReplayMode.NODES))
    assert (row.requests, row.refused_requests, row.block_hit_rate) == (2, 1, 0.5)


def test_a_leaf_is_a_chunk() -> None:
    """The tail of the first prompt goes for the second, and its first chunk is found by the third."""
    trace = build_trace([[1, 1, 1], [2, 2], [1, 1, 1]])
    counts = replay_nodes(trace, LruPolicy(4), 4, chunk_blocks=2)
    assert (counts.hit_blocks, counts.evicted_blocks) == (2, 3)


@given(tree_traces, st.integers(1, 12), st.integers(1, 4))
def test_what_a_running_request_uses_stays(trace: Trace, capacity: int, chunk: int) -> None:
    """Else its next chunk would hang on a node that is gone."""

    class Watched(LruPolicy):
        path: tuple[int, ...] = ()

        def begin_request(self, request: int) -> None:
            super().begin_request(request)
            self.path = tuple(trace.request(request).tolist())

        def victim(self) -> int:
            block = super().victim()
            assert block not in self.path[: self._computed()]
            return block

        def _computed(self) -> int:
            return next((at for at, block in enumerate(self.path) if block not in seen), len(self.path))

    seen: set[int] = set()
    policy = Watched(capacity)
    tree = RadixTree(policy)
    for index in range(trace.num_requests):
        path = trace.request(index).tolist()
        if len(path) > capacity:
            continue
        policy.begin_request(index)
        node, matched = tree.match(path)
        seen = set(path[:matched])
        while matched < len(path):
            stop = min(matched + chunk, len(path))
            while tree.used + stop - matched > capacity:
                tree.evict(in_use=node)
            node, matched = tree.extend(node, path[:stop], matched), stop
            seen = set(path[:matched])
            tree.check_integrity()
        tree.release(node)


def test_mean_node_length_is_that_of_the_whole_tree() -> None:
    # Nodes: [1 1], behind it [1 1] and [2], and [3 3 3] that a request ends in after two blocks.
    trace = build_trace([[1, 1, 1, 1], [1, 1, 2], [3, 3, 3], [3, 3]])
    assert mean_node_blocks(trace) == 8 / 5


@given(tree_traces, st.none() | st.integers(1, 4))
def test_mean_node_length_counts_the_nodes_of_an_endless_cache(trace: Trace, chunk: int | None) -> None:
    tree = RadixTree(LruPolicy(1))
    for index in range(trace.num_requests):
        path = trace.request(index).tolist()
        node, matched = tree.match(path)
        while matched < len(path):
            stop = min(matched + (chunk or len(path)), len(path))
            node, matched = tree.extend(node, path[:stop], matched), stop
        tree.release(node)
    nodes = max(len(tree._nodes), 1)
    assert mean_node_blocks(trace, chunk_blocks=chunk) == max(trace.num_blocks, 1) / nodes


def _classes_of(trace: Trace, block_type: BlockType) -> set[int]:
    facts = block_facts(trace)
    return set(facts.reuse_classes[facts.block_types == block_type].tolist())

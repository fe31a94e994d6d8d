"""A prefix cache of radix nodes that are evicted whole, as in the server's tree.

A node is a run of blocks without a branch. A request that leaves a node in its middle, or ends there, splits
it; added blocks become one new node for each prefill chunk; splits are never undone. Evicting a leaf frees
all its blocks, where ``replay_tree`` would give up a long unshared tail block by block.

As in a server, room is made before a chunk is computed, and a request that the cache cannot hold is refused.
Chunks are those of a request that is prefilled alone. Answers are left out: traces of blocks do not say what
they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from sgl_importance_lab.policies.base import EvictionPolicy
from sgl_importance_lab.replay.cache import ReplayCounts
from sgl_importance_lab.replay.trace import NO_PARENT, Trace


class RadixNode:
    """A run of blocks, known to policies by the last of them, its tip."""

    __slots__ = ("blocks", "children", "parent")

    def __init__(self, parent: RadixNode | None, blocks: list[int]) -> None:
        self.parent = parent
        self.blocks = blocks
        self.children: dict[int, RadixNode] = {}  # by first block

    @property
    def tip(self) -> int:
        return self.blocks[-1]


class RadixTree:
    """Nodes in the cache, and the calls to the policy that follow from their events.

    A policy of blocks knows a node by its tip: the node is inserted, accessed and evicted once, whatever its
    length. When a node is split, the lower part keeps the tip and with it the history; the upper part is new
    to the policy, inserted because the splitting request uses it. Policies that follow the trace are told the
    position of a node's first block: a node is used whenever that one is.

    Attributes:
        used: blocks in the cache.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.used = 0
        self._policy = policy
        self._root = RadixNode(None, [])
        self._nodes: dict[int, RadixNode] = {}

    def match(self, path: Sequence[int]) -> tuple[RadixNode, int]:
        """Uses the longest prefix of the path; returns its last node, split off if need be, and length."""
        node, matched = self._root, 0
        while matched < len(path) and (child := node.children.get(path[matched])) is not None:
            pairs = zip(child.blocks, path[matched : matched + len(child.blocks)], strict=False)
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            matched += common
            if common < len(child.blocks):
                return self._split(child, common, matched - common), matched
            if not child.children:
                self._policy.held(child.tip)
            self._policy.at(matched - common)
            self._policy.access(child.tip)
            node = child
        return node, matched

    def _split(self, node: RadixNode, length: int, start: int) -> RadixNode:
        """Splits a node behind its first ``length`` blocks, which ``start`` blocks precede on the path;
        returns the upper part."""
        assert node.parent is not None
        upper = RadixNode(node.parent, node.blocks[:length])
        node.parent.children[upper.blocks[0]] = upper
        node.blocks = node.blocks[length:]
        node.parent = upper
        upper.children[node.blocks[0]] = node
        self._nodes[upper.tip] = upper
        self._policy.at(start)
        self._policy.split(upper.tip, node.tip)
        return upper

    def extend(self, node: RadixNode, path: Sequence[int], matched: int) -> RadixNode:
        """Adds the rest of the path beyond the node as one leaf, if any; returns the path's last node."""
        if matched == len(path):
            return node
        leaf = RadixNode(node, list(path[matched:]))
        node.children[leaf.blocks[0]] = leaf
        self._nodes[leaf.tip] = leaf
        self.used += len(leaf.blocks)
        self._policy.at(matched)
        self._policy.miss(leaf.tip)
        self._policy.insert(leaf.tip)
        return leaf

    def release(self, node: RadixNode) -> None:
        """The request that used the node last has ended, or its last child is gone."""
        if node is not self._root and not node.children:
            self._policy.evictable(node.tip)

    def evict(self, in_use: RadixNode | None = None) -> RadixNode:
        """Drops the leaf that the policy chooses, and returns it.

        Args:
            in_use: the last node of the running request's path: it stays, though its last child goes.
        """
        node = self._nodes.pop(self._policy.victim())
        assert not node.children
        assert node.parent is not None
        del node.parent.children[node.blocks[0]]
        self.used -= len(node.blocks)
        if node.parent is not in_use:
            self.release(node.parent)
        return node

    def check_integrity(self) -> None:
        """Asserts that nodes and links agree and that ``used`` counts every block once."""
        assert self.used == sum(len(node.blocks) for node in self._nodes.values())
        for tip, node in self._nodes.items():
            assert node.tip == tip
            assert node.parent is not None
            assert node.parent.children[node.blocks[0]] is node
            assert node.parent is self._root or node.parent.tip in self._nodes


def replay_nodes(
    trace: Trace, policy: EvictionPolicy, capacity: int, *, chunk_blocks: int | None = None
) -> ReplayCounts:
    """Replays with nodes as the unit of eviction; a request longer than the cache is refused.

    Args:
        trace: requests as paths in a prefix tree.
        policy: ranks nodes; its own capacity counts nodes, see ``mean_node_blocks``.
        capacity: blocks that the cache can hold.
        chunk_blocks: most that a request computes, and inserts, at once; None for no bound.
    """
    assert trace.parents is not None, "independent objects have no prefix tree: use replay_objects"
    assert capacity > 0
    assert chunk_blocks is None or chunk_blocks > 0
    tree = RadixTree(policy)
    hit_blocks = hit_tokens = full_hits = evicted = refused = refused_blocks = refused_tokens = 0
    for index in range(trace.num_requests):
        path = trace.request(index).tolist()
        policy.begin_request(index)
        if len(path) > capacity:
            refused += 1
            refused_blocks += len(path)
            refused_tokens += int(trace.input_tokens[index])
            continue
        node, matched = tree.match(path)
        hit_blocks += matched
        hit_tokens += min(matched * trace.block_tokens, int(trace.input_tokens[index]))
        full_hits += matched == len(path) > 0
        while matched < len(path):
            stop = min(matched + (chunk_blocks or capacity), len(path))
            while tree.used + stop - matched > capacity:
                evicted += len(tree.evict(in_use=node).blocks)
            node, matched = tree.extend(node, path[:stop], matched), stop
        tree.release(node)
    return ReplayCounts(
        hit_blocks, hit_tokens, full_hits, evicted, 0, refused, refused_blocks, refused_tokens
    )


def mean_node_blocks(trace: Trace, *, chunk_blocks: int | None = None) -> float:
    """Blocks per node of the tree that holds the whole trace: converts a capacity into a number of nodes.

    A node ends where a request ends, where the tree branches, or behind ``chunk_blocks`` of a request's
    blocks that no earlier one had. 1 for an empty trace.
    """
    assert trace.parents is not None
    requests_end = trace.offsets[1:][np.diff(trace.offsets) > 0] - 1
    children = np.bincount(trace.parents[trace.parents != NO_PARENT], minlength=trace.num_blocks)
    node_ends = children != 1
    node_ends[trace.blocks[requests_end]] = True
    if chunk_blocks is not None:
        known = 0  # blocks are numbered as they appear, so those that a request adds follow each other
        for index in range(trace.num_requests):
            path = trace.request(index)
            seen = int(path.max()) + 1 if len(path) else 0
            node_ends[known + chunk_blocks - 1 : seen : chunk_blocks] = True
            known = max(known, seen)
    return max(trace.num_blocks, 1) / max(int(node_ends.sum()), 1)

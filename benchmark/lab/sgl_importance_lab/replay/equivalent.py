"""Hits of LRU at every capacity, from one pass: how large an LRU cache equals a given hit rate.

Leaf-only LRU is a stack algorithm (Mattson et al., 1970): order all blocks by the last request that used
them, and within a request from root to leaf. A cache of C blocks holds exactly the first C of that order,
because a request puts its path in front and evicts from the back, and a prefix longer than C keeps its root
side. So a block is hit if and only if its place in the order, at the start of its request, is at most C.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from sgl_importance_lab.replay.trace import IntArray, Trace


@dataclass(frozen=True, slots=True)
class LruCurve:
    """Hits of LRU by capacity; index 0 is no cache, the last index holds every block of the trace.

    Attributes:
        hit_blocks: int64 [unique blocks + 1].
        hit_tokens: int64 [unique blocks + 1].
        full_hits: int64 [unique blocks + 1].
    """

    hit_blocks: IntArray
    hit_tokens: IntArray
    full_hits: IntArray

    def capacity_for(self, hit_blocks: int) -> int | None:
        """Fewest blocks with which LRU hits at least so many; None if no capacity is enough."""
        capacity = int(np.searchsorted(self.hit_blocks, hit_blocks))
        return capacity if capacity < len(self.hit_blocks) else None


def lru_curve(trace: Trace, *, object_level: bool = False) -> LruCurve:
    """Hits of ``replay_lru`` at every capacity, in O(accesses x log unique blocks)."""
    assert object_level or trace.parents is not None, "independent objects have no prefix tree"
    lengths = np.diff(trace.offsets)
    by_place = _hits_by_place(
        trace.blocks,
        trace.offsets,
        trace.input_tokens,
        trace.num_blocks,
        trace.block_tokens,
        int(lengths.max(initial=1)),
        object_level,
    )
    return LruCurve(*(np.cumsum(counts) for counts in by_place))


@njit(cache=True, inline="always")
def _add(tree: Any, slot: int, change: int) -> None:
    """Fenwick tree over slots: adds to one of them."""
    node = slot + 1
    while node < len(tree):
        tree[node] += change
        node += node & -node


@njit(cache=True, inline="always")
def _sum_before(tree: Any, slot: int) -> int:
    total = 0
    node = slot
    while node > 0:
        total += tree[node]
        node -= node & -node
    return total


@njit(cache=True)
def _pack(tree: Any, owner: Any, slot_of: Any, used: int) -> int:
    """Moves the live slots together at the start, in order; returns how many there are."""
    live = 0
    for slot in range(used):
        block = owner[slot]
        if block >= 0:
            owner[live] = block
            slot_of[block] = live
            live += 1
    owner[live:] = -1
    tree[:] = 0
    for slot in range(live):
        _add(tree, slot, 1)
    return live


@njit(cache=True)
def _hits_by_place(
    blocks: Any,
    offsets: Any,
    input_tokens: Any,
    num_blocks: int,
    block_tokens: int,
    longest: int,
    object_level: bool,
) -> Any:
    """Hit blocks, hit tokens and full hits that first appear at each capacity; int64 [3, num_blocks + 1].

    In one array: numba makes a tuple of several without looking whether each could be made, and after an
    interrupt one could not.
    """
    slots = 2 * num_blocks + longest  # later slot: more recent; packed once full, so linear in blocks
    tree = np.zeros(slots + 1, dtype=np.int64)
    owner = np.full(slots, -1, dtype=np.int64)
    slot_of = np.full(num_blocks, -1, dtype=np.int64)
    places = np.zeros((3, num_blocks + 1), dtype=np.int64)
    used = live = 0
    for index in range(len(offsets) - 1):
        start, stop = offsets[index], offsets[index + 1]
        if used + stop - start > slots:
            used = _pack(tree, owner, slot_of, used)
        deepest = 0
        seen_all = stop > start
        for position in range(start, stop):
            block = blocks[position]
            slot = slot_of[block]
            if slot < 0:
                seen_all = False
            else:
                place = live - _sum_before(tree, slot)
                deepest = max(deepest, place)
                places[0, place] += 1
                places[1, place] += min(block_tokens, input_tokens[index] - (position - start) * block_tokens)
            if object_level:
                live += _renew(tree, owner, slot_of, block, used)
                used += 1
        if seen_all:
            places[2, deepest] += 1
        if not object_level:
            for position in range(stop - 1, start - 1, -1):
                live += _renew(tree, owner, slot_of, blocks[position], used)
                used += 1
    return places


@njit(cache=True)
def _renew(tree: Any, owner: Any, slot_of: Any, block: int, slot: int) -> int:
    """Gives a block the most recent slot; returns 1 if it had none before, else 0."""
    previous = slot_of[block]
    if previous >= 0:
        _add(tree, previous, -1)
        owner[previous] = -1
    _add(tree, slot, 1)
    owner[slot] = block
    slot_of[block] = slot
    return 1 if previous < 0 else 0

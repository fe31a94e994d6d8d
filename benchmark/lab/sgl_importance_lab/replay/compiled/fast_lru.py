"""LRU at millions of block accesses a second: a doubly linked list in two arrays, compiled by numba.

Leaf-only LRU needs no tree: a request moves its blocks to the front leaf first and root last, so a block is
never staler than its children and the tail of the list is always a leaf. Counts equal those of
``replay_tree`` and ``replay_objects`` with ``LruPolicy``, which define them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from sgl_importance_lab.replay.cache import ReplayCounts
from sgl_importance_lab.replay.trace import Trace

_SIGNATURE = "UniTuple(int64, 5)(int64[::1], int64[::1], int64[::1], int64, int64, int64)"
"""Given, so that compiling is part of the import and never of a measured replay."""


def replay_lru(trace: Trace, capacity: int, *, object_level: bool = False) -> ReplayCounts:
    """Replays least-recently-used eviction; see ``replay_tree`` and ``replay_objects``."""
    assert capacity > 0
    assert object_level or trace.parents is not None, "independent objects have no prefix tree"
    replay = _replay_objects if object_level else _replay_paths
    counts = replay(
        trace.blocks, trace.offsets, trace.input_tokens, trace.num_blocks, trace.block_tokens, capacity
    )
    return ReplayCounts(*(int(count) for count in counts))


@njit(cache=True, inline="always")
def _unlink(newer: Any, older: Any, block: int) -> None:
    older[newer[block]] = older[block]
    newer[older[block]] = newer[block]


@njit(cache=True, inline="always")
def _push_front(newer: Any, older: Any, end: int, block: int) -> None:
    front = older[end]
    older[end] = block
    newer[block] = end
    older[block] = front
    newer[front] = block


@njit(_SIGNATURE, cache=True)
def _replay_paths(
    blocks: Any, offsets: Any, input_tokens: Any, num_blocks: int, block_tokens: int, capacity: int
) -> tuple[int, int, int, int, int]:
    end = num_blocks  # the list is a ring: older[end] is its front, newer[end] its tail
    newer = np.full(num_blocks + 1, end, dtype=np.int64)
    older = np.full(num_blocks + 1, end, dtype=np.int64)
    resident = np.zeros(num_blocks, dtype=np.bool_)
    used = hit_blocks = hit_tokens = full_hits = evicted = rejected = 0
    for index in range(len(offsets) - 1):
        root, stop = offsets[index], offsets[index + 1]
        tip = root
        while tip < stop and resident[blocks[tip]]:
            _unlink(newer, older, blocks[tip])
            tip += 1
        hits = tip - root
        hit_blocks += hits
        hit_tokens += min(hits * block_tokens, input_tokens[index])
        if hits == stop - root and hits > 0:
            full_hits += 1
        kept = min(stop - root, capacity)
        rejected += stop - root - kept
        used += kept - hits
        while used > capacity:
            victim = newer[end]
            _unlink(newer, older, victim)
            resident[victim] = False
            evicted += 1
            used -= 1
        for position in range(root + kept - 1, root - 1, -1):
            resident[blocks[position]] = True
            _push_front(newer, older, end, blocks[position])
    return hit_blocks, hit_tokens, full_hits, evicted, rejected


@njit(_SIGNATURE, cache=True)
def _replay_objects(
    blocks: Any, offsets: Any, input_tokens: Any, num_blocks: int, block_tokens: int, capacity: int
) -> tuple[int, int, int, int, int]:
    end = num_blocks
    newer = np.full(num_blocks + 1, end, dtype=np.int64)
    older = np.full(num_blocks + 1, end, dtype=np.int64)
    resident = np.zeros(num_blocks, dtype=np.bool_)
    used = hit_blocks = hit_tokens = full_hits = evicted = 0
    for index in range(len(offsets) - 1):
        start, stop = offsets[index], offsets[index + 1]
        hits = 0
        for position in range(start, stop):
            block = blocks[position]
            if resident[block]:
                hits += 1
                hit_tokens += min(block_tokens, input_tokens[index] - (position - start) * block_tokens)
                _unlink(newer, older, block)
            else:
                if used == capacity:
                    victim = newer[end]
                    _unlink(newer, older, victim)
                    resident[victim] = False
                    evicted += 1
                    used -= 1
                resident[block] = True
                used += 1
            _push_front(newer, older, end, block)
        hit_blocks += hits
        if hits == stop - start and hits > 0:
            full_hits += 1
    return hit_blocks, hit_tokens, full_hits, evicted, 0

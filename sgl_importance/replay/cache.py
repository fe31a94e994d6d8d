"""A radix-tree prefix cache of whole blocks, driven one request at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_importance.policy.base import EvictionPolicy
from sgl_importance.replay.trace import NO_PARENT, Trace


@dataclass(frozen=True, slots=True)
class ReplayCounts:
    """What one replay counted.

    Attributes:
        hit_blocks: blocks that were in the cache when asked for.
        hit_tokens: prompt tokens in those blocks.
        full_hits: requests whose every block was in the cache.
        evicted_blocks: blocks that were given up.
        rejected_blocks: blocks that found no room, because their own request fills the cache.
    """

    hit_blocks: int
    hit_tokens: int
    full_hits: int
    evicted_blocks: int
    rejected_blocks: int


def replay_tree(trace: Trace, policy: EvictionPolicy) -> ReplayCounts:
    """Replays with prefix-cache semantics: the readable definition that fast paths are tested against.

    A request hits its longest prefix in the cache, then all its blocks become resident, root side first.
    While it runs its blocks are held; otherwise a block is evictable as long as no child of it is in the
    cache (leaf-only eviction, as in RadixAttention). A request longer than the cache keeps what fits.
    """
    assert trace.parents is not None, "independent objects have no prefix tree: use replay_objects"
    parents = trace.parents
    resident = np.zeros(trace.num_blocks, dtype=bool)
    children = np.zeros(trace.num_blocks, dtype=np.int64)
    used = hit_blocks = hit_tokens = full_hits = evicted = rejected = 0
    for index in range(trace.num_requests):
        path = trace.request(index).tolist()
        policy.begin_request(index)
        hits = next((i for i, block in enumerate(path) if not resident[block]), len(path))
        hit_blocks += hits
        hit_tokens += min(hits * trace.block_tokens, int(trace.input_tokens[index]))
        full_hits += hits == len(path) > 0
        if hits and children[path[hits - 1]] == 0:
            policy.held(path[hits - 1])
        for block in path[:hits]:
            policy.access(block)
        for position in range(hits, len(path)):
            block = path[position]
            policy.miss(block)
            if used == policy.capacity:
                if used == position:  # everything in the cache is this request's own
                    rejected += len(path) - position
                    path = path[:position]
                    break
                victim = policy.victim()
                assert resident[victim]
                assert children[victim] == 0
                resident[victim] = False
                evicted += 1
                used -= 1
                parent = parents[victim]
                if parent != NO_PARENT:
                    children[parent] -= 1
                    running_tip = position > 0 and parent == path[position - 1]
                    if children[parent] == 0 and not running_tip:
                        policy.evictable(int(parent))
            resident[block] = True
            used += 1
            if position:
                children[path[position - 1]] += 1
            policy.insert(block)
        if path and children[path[-1]] == 0:
            policy.evictable(path[-1])
    return ReplayCounts(hit_blocks, hit_tokens, full_hits, evicted, rejected)


def replay_objects(trace: Trace, policy: EvictionPolicy) -> ReplayCounts:
    """Replays every block as an object of its own, as general cache simulators do.

    A block is looked up, and inserted on a miss, before the next one: blocks of one request may evict each
    other, and a hit needs no resident prefix.
    """
    resident = np.zeros(trace.num_blocks, dtype=bool)
    used = hit_blocks = hit_tokens = full_hits = evicted = 0
    for index in range(trace.num_requests):
        path = trace.request(index).tolist()
        policy.begin_request(index)
        hits = 0
        for position, block in enumerate(path):
            if resident[block]:
                policy.access(block)
                hits += 1
                hit_tokens += min(
                    trace.block_tokens, int(trace.input_tokens[index]) - position * trace.block_tokens
                )
                continue
            policy.miss(block)
            if used == policy.capacity:
                victim = policy.victim()
                assert resident[victim]
                resident[victim] = False
                evicted += 1
                used -= 1
            resident[block] = True
            used += 1
            policy.insert(block)
            policy.evictable(block)
        hit_blocks += hits
        full_hits += hits == len(path) > 0
    return ReplayCounts(hit_blocks, hit_tokens, full_hits, evicted, 0)

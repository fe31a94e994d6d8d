"""A radix-tree prefix cache of whole blocks, driven one request at a time."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_importance_lab.policies.base import EvictionPolicy
from sgl_importance_lab.replay.trace import NO_PARENT, Trace

__all__ = ["ReplayCounts", "replay_objects", "replay_tree"]


@dataclass(frozen=True, slots=True)
class ReplayCounts:
    """Counts of one replay.

    Attributes:
        hit_blocks: blocks that were in the cache when asked for.
        hit_tokens: prompt tokens in those blocks.
        full_hits: requests whose every block was in the cache.
        evicted_blocks: blocks that were given up, without the rejected ones.
        rejected_blocks: blocks that were given up when the very request that computed them ended.
        refused_requests: requests that the cache could not hold, which a server refuses; they are in no other
            count.
        refused_blocks: of these.
        refused_tokens: of their prompts.
    """

    hit_blocks: int
    hit_tokens: int
    full_hits: int
    evicted_blocks: int
    rejected_blocks: int
    refused_requests: int = 0
    refused_blocks: int = 0
    refused_tokens: int = 0


def replay_tree(trace: Trace, policy: EvictionPolicy) -> ReplayCounts:
    """Replays with prefix-cache semantics: the readable definition that fast paths are tested against.

    A request hits its longest prefix in the cache, then all its blocks become resident and are held while it
    runs. When it ends, blocks are evicted until the cache is within its capacity again. A block is evictable
    as long as no child of it is in the cache (leaf-only eviction, as in RadixAttention).

    The blocks of the request that just ended are candidates like all others, so a policy may at once give up
    blocks that will not be used again, and a request longer than the cache keeps as many as fit. Were they
    not, no policy could protect the cache from a long prompt, and furthest-next-use would not be the optimum.
    """
    assert trace.parents is not None, "independent objects have no prefix tree: use replay_objects"
    parents = trace.parents.tolist()
    resident = bytearray(trace.num_blocks)
    children = [0] * trace.num_blocks
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
            resident[block] = True
            used += 1
            if position:
                children[path[position - 1]] += 1
            policy.insert(block)
        if path and children[path[-1]] == 0:
            policy.evictable(path[-1])
        computed = frozenset(path[hits:]) if used > policy.capacity else frozenset()
        while used > policy.capacity:
            victim = policy.victim()
            assert resident[victim]
            assert children[victim] == 0
            resident[victim] = False
            used -= 1
            if victim in computed:
                rejected += 1
            else:
                evicted += 1
            parent = parents[victim]
            if parent != NO_PARENT:
                children[parent] -= 1
                if children[parent] == 0:
                    policy.evictable(parent)
    return ReplayCounts(hit_blocks, hit_tokens, full_hits, evicted, rejected)


def replay_objects(trace: Trace, policy: EvictionPolicy) -> ReplayCounts:
    """Replays every block as an object of its own, as general cache simulators do.

    A block is looked up, and inserted on a miss, before the next one: blocks of one request may evict each
    other, and a hit needs no resident prefix.
    """
    resident = bytearray(trace.num_blocks)
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

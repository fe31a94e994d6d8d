"""Segmented LRU: a block climbs a segment with every use, and falls one where a segment overflows."""

from __future__ import annotations

from typing import ClassVar

from sgl_importance_lab.policies.base import EvictionPolicy
from sgl_importance_lab.policies.block_queue import BlockQueue


class SlruPolicy(EvictionPolicy):
    """Karedla, Love, Wherry: Caching Strategies to Improve Disk System Performance, 1994 (two segments);
    Huang et al.: An Analysis of Facebook Photo Caching, SOSP 2013 (S4LRU: four equal segments, the default).

    As libCacheSim's ``SLRU.c``, a new block enters the lowest segment that has room while the cache fills.
    sglang's ``slru`` is another policy: two segments told apart by a hit count, of no bounded size, so that
    a block once protected never falls back. In a prefix tree a held block is promoted and demoted like any
    other; the victim is the oldest evictable block of the lowest segment that has one.

    Args:
        capacity: see ``EvictionPolicy``.
        segments: number of segments of equal size, at least 1.
    """

    name: ClassVar[str] = "slru"

    def __init__(self, capacity: int, *, segments: int = 4) -> None:
        super().__init__(capacity)
        assert segments > 0
        self._segment_capacity = capacity // segments
        self._candidates: set[int] = set()
        self._segments = [BlockQueue(self._candidates) for _ in range(segments)]
        self._segment_of: dict[int, int] = {}

    def insert(self, block: int) -> None:
        room = (i for i, queue in enumerate(self._segments) if len(queue) < self._segment_capacity)
        self._enter(block, next(room, 0))

    def access(self, block: int) -> None:
        segment = self._segment_of[block]
        if segment == len(self._segments) - 1:
            self._segments[segment].append(block)
            return
        self._segments[segment].remove(block)
        self._enter(block, segment + 1)
        if len(self._segments[segment + 1]) > self._segment_capacity:
            self._demote(segment + 1)  # into the place that the block has just left

    def _enter(self, block: int, segment: int) -> None:
        self._segments[segment].append(block)
        self._segment_of[block] = segment

    def _demote(self, segment: int) -> None:
        block = self._segments[segment].oldest()
        assert block is not None
        self._segments[segment].remove(block)
        self._enter(block, segment - 1)

    def evictable(self, block: int) -> None:
        self._candidates.add(block)
        self._segments[self._segment_of[block]].offer(block)

    def held(self, block: int) -> None:
        self._candidates.discard(block)

    def victim(self) -> int:
        for queue in self._segments:
            block = queue.oldest_candidate()
            if block is not None:
                queue.remove(block)
                del self._segment_of[block]
                self._candidates.discard(block)
                return block
        raise IndexError("no evictable block")

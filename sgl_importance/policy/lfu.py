"""Least frequently used since it was computed; among equals the least recently used."""

from __future__ import annotations

from typing import ClassVar

from sgl_importance.policy.base import EvictionPolicy
from sgl_importance.policy.ranked import RankedBlocks


class LfuPolicy(EvictionPolicy):
    """Mattson, Gecsei, Slutz, Traiger: Evaluation Techniques for Storage Hierarchies, 1970 (section LFU).

    Counts start at 1 and end with the block's stay in the cache (in-cache LFU). Ties are broken as in sglang
    (``LFUStrategy``: hit count, then last access) and libCacheSim (``LFU.c``: first to reach the count).
    """

    name: ClassVar[str] = "lfu"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._time = 0
        self._ranks: dict[int, tuple[int, int]] = {}  # uses, time of the last one
        self._order = RankedBlocks()

    def insert(self, block: int) -> None:
        self._time += 1
        self._ranks[block] = (1, self._time)

    def access(self, block: int) -> None:
        self._time += 1
        self._ranks[block] = rank = (self._ranks[block][0] + 1, self._time)
        if block in self._order:
            self._order.add(block, rank)

    def evictable(self, block: int) -> None:
        self._order.add(block, self._ranks[block])

    def held(self, block: int) -> None:
        self._order.discard(block)

    def victim(self) -> int:
        block = self._order.pop()
        del self._ranks[block]
        return block

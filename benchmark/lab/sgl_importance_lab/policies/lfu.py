"""Least frequently used since it was computed; among equals the least recently used."""

from __future__ import annotations

from typing import ClassVar

from sgl_importance_lab.policies.ranked import RankedPolicy


class LfuPolicy(RankedPolicy[tuple[int, int]]):
    """Mattson, Gecsei, Slutz, Traiger: Evaluation Techniques for Storage Hierarchies, 1970 (section LFU).

    Counts start at 1 and end with the block's stay in the cache (in-cache LFU). Ties are broken as in sglang
    (``LFUStrategy``: hit count, then last access) and libCacheSim (``LFU.c``: first to reach the count).
    """

    name: ClassVar[str] = "lfu"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._time = 0  # a rank: uses, and the time of the last one

    def insert(self, block: int) -> None:
        self._time += 1
        self._rank(block, (1, self._time))

    def access(self, block: int) -> None:
        self._time += 1
        self._rank(block, (self._ranks[block][0] + 1, self._time))

"""LRU-2: the block whose last use but one is longest ago goes first."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

from sgl_importance_lab.policies.ranked import RankedPolicy


class Lru2Policy(RankedPolicy[tuple[int, int]]):
    """O'Neil, O'Neil, Weikum: The LRU-K Page Replacement Algorithm for Database Disk Buffering, SIGMOD 1993.

    Blocks that were used once go before all others, the one used longest ago first. As the paper asks, the
    last use of an evicted block is remembered; the correlated reference period is zero.

    Args:
        capacity: see ``EvictionPolicy``.
        history: remembered evicted blocks, as a multiple of the capacity.
    """

    name: ClassVar[str] = "lru2"

    def __init__(self, capacity: int, *, history: float = 4.0) -> None:
        super().__init__(capacity)
        assert history >= 0
        self._history_capacity = int(history * capacity)
        self._evicted: OrderedDict[int, int] = OrderedDict()  # last use, oldest eviction first
        self._time = 0

    def insert(self, block: int) -> None:
        self._time += 1
        self._rank(block, (self._evicted.pop(block, 0), self._time))  # a rank: last use but one, last use

    def access(self, block: int) -> None:
        self._time += 1
        self._rank(block, (self._ranks[block][1], self._time))

    def _forget(self, block: int, rank: tuple[int, int]) -> None:
        self._evicted[block] = rank[1]
        if len(self._evicted) > self._history_capacity:
            self._evicted.popitem(last=False)

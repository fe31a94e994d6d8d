"""Least recently used. Among blocks of one request the deepest goes first, as leaves always do."""

from __future__ import annotations

from typing import ClassVar

from sgl_importance.policy.base import EvictionPolicy
from sgl_importance.policy.ranked import RankedBlocks


class LruPolicy(EvictionPolicy):
    """Mattson, Gecsei, Slutz, Traiger: Evaluation Techniques for Storage Hierarchies, 1970."""

    name: ClassVar[str] = "lru"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._time = 0
        self._last_access: dict[int, int] = {}
        self._order = RankedBlocks()

    def insert(self, block: int) -> None:
        self.access(block)

    def access(self, block: int) -> None:
        self._time += 1
        self._last_access[block] = self._time
        if block in self._order:
            self._order.add(block, self._time)

    def evictable(self, block: int) -> None:
        self._order.add(block, self._last_access[block])

    def held(self, block: int) -> None:
        self._order.discard(block)

    def victim(self) -> int:
        block = self._order.pop()
        del self._last_access[block]
        return block

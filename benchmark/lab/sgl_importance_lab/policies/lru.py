"""Least recently used. Among blocks of one request the deepest goes first, as leaves always do."""

from __future__ import annotations

from typing import ClassVar

from sgl_importance_lab.policies.ranked import RankedPolicy


class LruPolicy(RankedPolicy[int]):
    """Mattson, Gecsei, Slutz, Traiger: Evaluation Techniques for Storage Hierarchies, 1970."""

    name: ClassVar[str] = "lru"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._time = 0

    def insert(self, block: int) -> None:
        self.access(block)

    def access(self, block: int) -> None:
        self._time += 1
        self._rank(block, self._time)

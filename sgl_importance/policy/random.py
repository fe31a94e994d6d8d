"""Random replacement: every evictable block is as likely a victim as any other."""

from __future__ import annotations

from random import Random
from typing import ClassVar

from sgl_importance.policy.base import EvictionPolicy


class RandomPolicy(EvictionPolicy):
    """Belady: A Study of Replacement Algorithms for a Virtual-Storage Computer, 1966 (his rule RAND).

    Args:
        capacity: see ``EvictionPolicy``.
        seed: the same seed and events lead to the same victims.
    """

    name: ClassVar[str] = "random"

    def __init__(self, capacity: int, *, seed: int = 0) -> None:
        super().__init__(capacity)
        self._random = Random(seed)
        self._candidates: list[int] = []
        self._places: dict[int, int] = {}

    def insert(self, block: int) -> None:
        pass

    def access(self, block: int) -> None:
        pass

    def evictable(self, block: int) -> None:
        if block not in self._places:
            self._places[block] = len(self._candidates)
            self._candidates.append(block)

    def held(self, block: int) -> None:
        place = self._places.pop(block, None)
        if place is None:
            return
        last = self._candidates.pop()
        if last != block:
            self._candidates[place] = last
            self._places[last] = place

    def victim(self) -> int:
        block = self._candidates[int(self._random.random() * len(self._candidates))]
        self.held(block)
        return block

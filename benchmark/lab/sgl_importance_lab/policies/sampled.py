"""Policies that draw evictable blocks at random."""

from __future__ import annotations

from random import Random

from sgl_importance_lab.policies.base import EvictionPolicy


class SampledPolicy(EvictionPolicy):
    """Base of policies that draw: candidates in a list, so that one is drawn, entered or removed in O(1).

    Args:
        capacity: see ``EvictionPolicy``.
        seed: the same seed and events lead to the same victims.
    """

    def __init__(self, capacity: int, *, seed: int = 0) -> None:
        super().__init__(capacity)
        self._random = Random(seed)
        self._candidates: list[int] = []
        self._places: dict[int, int] = {}  # of the candidates in the list

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

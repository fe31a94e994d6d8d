"""SIEVE: a queue in order of insertion, and a hand that gives up what was not used since it last passed."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import ClassVar

from sgl_importance_lab.policies.base import EvictionPolicy


class SievePolicy(EvictionPolicy):
    """Zhang, Yang, Yue, Vigfusson, Rashmi: SIEVE is Simpler than LRU, NSDI 2024.

    The hand goes from the oldest block to the newest; what was used since it last passed keeps its place and
    loses its mark. In a prefix tree the hand passes over held blocks, which keep their marks.
    """

    name: ClassVar[str] = "sieve"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._inserted = 0
        self._place: dict[int, int] = {}  # of a block in the order of insertion
        self._blocks: dict[int, int] = {}  # by place
        self._candidates: list[int] = []  # places, ascending
        self._used: set[int] = set()
        self._hand = 0

    def insert(self, block: int) -> None:
        self._place[block] = self._inserted
        self._blocks[self._inserted] = block
        self._inserted += 1

    def access(self, block: int) -> None:
        self._used.add(block)

    def evictable(self, block: int) -> None:
        insort(self._candidates, self._place[block])

    def held(self, block: int) -> None:
        del self._candidates[bisect_left(self._candidates, self._place[block])]

    def victim(self) -> int:
        if not self._candidates:
            raise IndexError("no evictable block")
        at = bisect_left(self._candidates, self._hand) % len(self._candidates)
        while self._blocks[self._candidates[at]] in self._used:
            self._used.remove(self._blocks[self._candidates[at]])
            at = (at + 1) % len(self._candidates)
        # Behind the newest candidate the hand begins anew, even if another one comes first.
        self._hand = self._candidates[at] + 1 if at + 1 < len(self._candidates) else 0
        place = self._candidates.pop(at)
        block = self._blocks.pop(place)
        del self._place[block]
        return block

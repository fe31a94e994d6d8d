"""Adaptive replacement cache: balances recency and frequency by what it regrets having evicted."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

from sgl_importance_lab.policies.base import EvictionPolicy
from sgl_importance_lab.policies.block_queue import BlockQueue


class ArcPolicy(EvictionPolicy):
    """Megiddo, Modha: ARC: A Self-Tuning, Low Overhead Replacement Cache, FAST 2003.

    Blocks used once since they were computed are in T1 (``recent``), the others in T2 (``frequent``); what
    they evict is remembered in B1 and B2. The target size of T1, p in the paper, is a real number, as in
    libCacheSim's ``ARC.c``. In a prefix tree a held block keeps its place: the victim is the oldest evictable
    block of the list that the paper chooses, or of the other one if the first has only held blocks.
    """

    name: ClassVar[str] = "arc"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._candidates: set[int] = set()
        self._recent = BlockQueue(self._candidates)
        self._frequent = BlockQueue(self._candidates)
        self._evicted_recent: OrderedDict[int, None] = OrderedDict()
        self._evicted_frequent: OrderedDict[int, None] = OrderedDict()
        self._target = 0.0
        self._regrets_recent = False
        self._regrets_frequent = False

    def miss(self, block: int) -> None:
        self._regrets_recent = block in self._evicted_recent
        self._regrets_frequent = block in self._evicted_frequent
        recent, frequent = len(self._evicted_recent), len(self._evicted_frequent)
        if self._regrets_recent:
            self._target = min(self._target + max(frequent / recent, 1.0), self.capacity)
            del self._evicted_recent[block]
        elif self._regrets_frequent:
            self._target = max(self._target - max(recent / frequent, 1.0), 0.0)
            del self._evicted_frequent[block]

    def insert(self, block: int) -> None:
        (self._frequent if self._regrets_recent or self._regrets_frequent else self._recent).append(block)
        self._regrets_recent = self._regrets_frequent = False
        self._bound_memory()

    def access(self, block: int) -> None:
        if block in self._recent:
            self._recent.remove(block)
        self._frequent.append(block)

    def evictable(self, block: int) -> None:
        self._candidates.add(block)
        (self._recent if block in self._recent else self._frequent).offer(block)

    def held(self, block: int) -> None:
        self._candidates.discard(block)

    def victim(self) -> int:
        recent = len(self._recent)
        from_recent = recent > self._target or (recent == self._target and self._regrets_frequent)
        block = self._recent.oldest_candidate() if from_recent else self._frequent.oldest_candidate()
        if block is None:
            from_recent = not from_recent
            block = self._recent.oldest_candidate() if from_recent else self._frequent.oldest_candidate()
        if block is None:
            raise IndexError("no evictable block")
        (self._recent if from_recent else self._frequent).remove(block)
        (self._evicted_recent if from_recent else self._evicted_frequent)[block] = None
        self._candidates.discard(block)
        self._bound_memory()
        return block

    def _bound_memory(self) -> None:
        """Keeps |T1| + |B1| <= c and |T1| + |T2| + |B1| + |B2| <= 2c, once room has been made."""
        resident = len(self._recent) + len(self._frequent)
        if resident > self.capacity:
            return
        while self._evicted_recent and len(self._recent) + len(self._evicted_recent) > self.capacity:
            self._evicted_recent.popitem(last=False)
        while resident + len(self._evicted_recent) + len(self._evicted_frequent) > 2 * self.capacity:
            self._evicted_frequent.popitem(last=False)

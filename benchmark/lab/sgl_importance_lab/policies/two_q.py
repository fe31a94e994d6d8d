"""2Q: what is asked for again soon after it left a short queue is worth a place in the long one."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

from sgl_importance_lab.policies.base import EvictionPolicy
from sgl_importance_lab.policies.block_queue import BlockQueue


class TwoQPolicy(EvictionPolicy):
    """Johnson, Shasha: 2Q: A Low Overhead High Performance Buffer Management Replacement Algorithm,
    VLDB 1994.

    The full version with the sizes that the paper recommends, as in libCacheSim's ``TwoQ.c``. New blocks go
    through A1in, a queue in which uses do not count. What it gives up is remembered in A1out, and a block
    that returns from there enters Am, which is LRU. In a prefix tree a held block keeps its place; the victim
    is the oldest evictable block of the queue that the paper chooses, or of the other one if it has only held
    blocks.

    Args:
        capacity: see ``EvictionPolicy``.
        incoming: size of A1in, as a part of the capacity.
        history: remembered blocks of A1in, as a part of the capacity.
    """

    name: ClassVar[str] = "2q"

    def __init__(self, capacity: int, *, incoming: float = 0.25, history: float = 0.5) -> None:
        super().__init__(capacity)
        assert 0 <= incoming <= 1
        assert history >= 0
        self._incoming_capacity = int(incoming * capacity)
        self._history_capacity = int(history * capacity)
        self._candidates: set[int] = set()
        self._incoming = BlockQueue(self._candidates)
        self._frequent = BlockQueue(self._candidates)
        self._evicted: OrderedDict[int, None] = OrderedDict()
        self._returns = False

    def miss(self, block: int) -> None:
        self._returns = block in self._evicted
        self._evicted.pop(block, None)

    def insert(self, block: int) -> None:
        (self._frequent if self._returns else self._incoming).append(block)
        self._returns = False

    def access(self, block: int) -> None:
        if block in self._frequent:
            self._frequent.append(block)

    def evictable(self, block: int) -> None:
        self._candidates.add(block)
        (self._incoming if block in self._incoming else self._frequent).offer(block)

    def held(self, block: int) -> None:
        self._candidates.discard(block)

    def victim(self) -> int:
        queue, other = self._incoming, self._frequent
        if len(self._incoming) <= self._incoming_capacity:
            queue, other = other, queue
        block = queue.oldest_candidate()
        if block is None:
            queue, block = other, other.oldest_candidate()
        if block is None:
            raise IndexError("no evictable block")
        queue.remove(block)
        self._candidates.discard(block)
        if queue is self._incoming:
            self._evicted[block] = None
            if len(self._evicted) > self._history_capacity:
                self._evicted.popitem(last=False)
        return block

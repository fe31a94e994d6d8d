"""Multi-queue: LRU queues by the logarithm of the use count, left for a lower one when a lifetime is over."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

from sgl_importance_lab.policies.base import EvictionPolicy
from sgl_importance_lab.policies.block_queue import BlockQueue


class MqPolicy(EvictionPolicy):
    """Zhou, Philbin, Li: The Multi-Queue Replacement Algorithm for Second Level Buffer Caches, USENIX 2001.

    A block with f uses lives in queue floor(log2 f); evicted blocks leave their count in a history, Qout, and
    take it up when they return. Held blocks age and fall like all others; the victim is the oldest evictable
    block of the lowest queue that has one. The paper sets the lifetime from measured reuse distances;
    libCacheSim's ``MQ.c`` fixes it, and its value is the default here.

    Args:
        capacity: see ``EvictionPolicy``.
        queues: number of queues, at least 1.
        lifetime: block accesses that a block stays in its queue unused.
        history: remembered evicted blocks, as a multiple of the capacity.
    """

    name: ClassVar[str] = "mq"

    def __init__(
        self, capacity: int, *, queues: int = 8, lifetime: int = 10_000, history: float = 4.0
    ) -> None:
        super().__init__(capacity)
        assert queues > 0
        assert lifetime > 0
        self._lifetime = lifetime
        self._history_capacity = int(history * capacity)
        self._candidates: set[int] = set()
        self._queues = [BlockQueue(self._candidates) for _ in range(queues)]
        self._uses: dict[int, int] = {}
        self._queue_of: dict[int, int] = {}
        self._expiry: dict[int, int] = {}
        self._evicted_uses: OrderedDict[int, int] = OrderedDict()
        self._remembered_uses = 0
        self._time = 0
        self._next_expiry = lifetime  # no block expires before it

    def miss(self, block: int) -> None:
        self._remembered_uses = self._evicted_uses.pop(block, 0)

    def insert(self, block: int) -> None:
        self._use(block, self._remembered_uses + 1)
        self._remembered_uses = 0

    def access(self, block: int) -> None:
        self._queues[self._queue_of[block]].remove(block)
        self._use(block, self._uses[block] + 1)

    def _use(self, block: int, uses: int) -> None:
        self._uses[block] = uses
        self._enter(block, min(uses.bit_length(), len(self._queues)) - 1)
        self._time += 1
        if self._time > self._next_expiry:
            self._demote_expired()

    def _enter(self, block: int, queue: int) -> None:
        self._queues[queue].append(block)
        self._queue_of[block] = queue
        self._expiry[block] = self._time + self._lifetime

    def _demote_expired(self) -> None:
        """Moves at most one block down per queue and access, as in the paper."""
        self._next_expiry = self._time + self._lifetime
        for queue in range(1, len(self._queues)):
            block = self._queues[queue].oldest()
            if block is not None and self._expiry[block] < self._time:
                self._queues[queue].remove(block)
                self._enter(block, queue - 1)
                block = self._queues[queue].oldest()
            if block is not None:
                self._next_expiry = min(self._next_expiry, self._expiry[block])

    def evictable(self, block: int) -> None:
        self._candidates.add(block)
        self._queues[self._queue_of[block]].offer(block)

    def held(self, block: int) -> None:
        self._candidates.discard(block)

    def victim(self) -> int:
        for queue in self._queues:
            block = queue.oldest_candidate()
            if block is not None:
                queue.remove(block)
                self._forget(block)
                return block
        raise IndexError("no evictable block")

    def _forget(self, block: int) -> None:
        del self._queue_of[block], self._expiry[block]
        self._candidates.discard(block)
        self._evicted_uses[block] = self._uses.pop(block)
        if len(self._evicted_uses) > self._history_capacity:
            self._evicted_uses.popitem(last=False)

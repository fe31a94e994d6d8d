"""S3-FIFO: a small queue on probation, a main queue with second chances, a memory of what was evicted."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

from sgl_importance_lab.policies.base import EvictionPolicy
from sgl_importance_lab.policies.block_queue import BlockQueue

_MOST_SECOND_CHANCES = 3  # a 2-bit counter


class S3FifoPolicy(EvictionPolicy):
    """Yang, Zhang, Qiu, Yue, Rashmi: FIFO Queues Are All You Need for Cache Eviction, SOSP 2023.

    Follows the authors' ``S3FIFO.c`` in libCacheSim, which differs from the paper where the cache fills for
    the first time (what the small queue has no room for starts in the main queue) and where a block moves to
    the main queue (its count starts anew). In a prefix tree the queues pass over held blocks, which keep
    their place; a queue of only held blocks leaves the choice to the other one.

    Args:
        capacity: see ``EvictionPolicy``.
        small: fraction of the capacity on probation; at least one block is.
        ghost: remembered evicted blocks, as a fraction of the capacity.
        promotion_uses: further uses on probation that lead to the main queue.
    """

    name: ClassVar[str] = "s3fifo"

    def __init__(
        self, capacity: int, *, small: float = 0.1, ghost: float = 0.9, promotion_uses: int = 2
    ) -> None:
        super().__init__(capacity)
        assert 0 < small < 1
        assert ghost >= 0
        assert promotion_uses > 0
        self._small_capacity = max(int(capacity * small), 1)
        self._main_capacity = capacity - self._small_capacity
        self._ghost_capacity = int(capacity * ghost)
        self._promotion_uses = promotion_uses
        self._candidates: set[int] = set()
        self._small = BlockQueue(self._candidates)
        self._main = BlockQueue(self._candidates)
        self._ghost: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}  # since the block entered its queue
        self._returns = False
        self._filled = False

    def miss(self, block: int) -> None:
        self._returns = block in self._ghost
        if self._returns:
            del self._ghost[block]

    def insert(self, block: int) -> None:
        overflows = not self._filled and len(self._small) >= self._small_capacity
        (self._main if self._returns or overflows else self._small).append(block)
        self._uses[block] = 0
        self._returns = False

    def access(self, block: int) -> None:
        self._uses[block] += 1

    def evictable(self, block: int) -> None:
        self._candidates.add(block)
        (self._small if block in self._small else self._main).offer(block)

    def held(self, block: int) -> None:
        self._candidates.discard(block)

    def victim(self) -> int:
        self._filled = True
        main_first = len(self._main) > self._main_capacity or not len(self._small)
        block = self._from_main() if main_first else self._from_small()
        if block is None:
            block = self._from_small() if main_first else self._from_main()
        if block is None:  # the small queue promoted all its candidates
            block = self._from_main()
        if block is None:
            raise IndexError("no evictable block")
        del self._uses[block]
        self._candidates.discard(block)
        return block

    def _from_small(self) -> int | None:
        while (block := self._small.oldest_candidate()) is not None:
            self._small.remove(block)
            if self._uses[block] < self._promotion_uses:
                self._remember(block)
                return block
            self._uses[block] = 0
            self._main.append(block)
        return None

    def _from_main(self) -> int | None:
        while (block := self._main.oldest_candidate()) is not None:
            uses = self._uses[block]
            if uses == 0:
                self._main.remove(block)
                return block
            self._uses[block] = min(uses, _MOST_SECOND_CHANCES) - 1
            self._main.append(block)
        return None

    def _remember(self, block: int) -> None:
        self._ghost[block] = None
        if len(self._ghost) > self._ghost_capacity:
            self._ghost.popitem(last=False)

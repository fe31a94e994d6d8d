"""W-TinyLFU: a newcomer takes a block's place only if it was asked for more often of late."""

from __future__ import annotations

from typing import ClassVar

from sgl_importance_lab.policies.base import EvictionPolicy
from sgl_importance_lab.policies.block_queue import BlockQueue

_MOST_USES = 15
"""Four bits in the paper's sketch."""


class WTinyLfuPolicy(EvictionPolicy):
    """Einziger, Friedman, Manes: TinyLFU: A Highly Efficient Cache Admission Policy, ACM ToS 2017.

    New blocks enter a window, which is LRU. The oldest block of a full window goes on to the main cache where
    that has room; else it stands against the main cache's victim, and the one with fewer uses leaves. The
    main cache is segmented LRU: a use protects a block, and where there are too many of these the oldest goes
    back on probation. Uses are counted of all blocks, also of those that are gone, up to 15, and halved after
    every ``sample`` accesses. We count exactly where the paper has a count-min sketch.

    In a prefix tree a held block keeps its place and is passed over.

    Args:
        capacity: see ``EvictionPolicy``.
        window: size of the window, as a part of the capacity; at least one block.
        protected: size of the protected segment, as a part of the main cache.
        sample: accesses from one halving to the next, as a multiple of the capacity.
    """

    name: ClassVar[str] = "wtinylfu"

    def __init__(
        self, capacity: int, *, window: float = 0.01, protected: float = 0.8, sample: float = 10.0
    ) -> None:
        super().__init__(capacity)
        assert 0 <= window <= 1
        assert 0 <= protected <= 1
        assert sample > 0
        self._window_capacity = max(1, int(window * capacity))
        self._main_capacity = capacity - self._window_capacity
        self._protected_capacity = int(protected * self._main_capacity)
        self._sample = max(1, int(sample * capacity))
        self._candidates: set[int] = set()
        self._window = BlockQueue(self._candidates)
        self._probation = BlockQueue(self._candidates)
        self._protected = BlockQueue(self._candidates)
        self._uses: dict[int, int] = {}
        self._accesses = 0

    def miss(self, block: int) -> None:
        self._count(block)

    def insert(self, block: int) -> None:
        self._window.append(block)
        while (
            len(self._window) > self._window_capacity
            and len(self._probation) + len(self._protected) < self._main_capacity
        ):
            oldest = self._window.oldest()
            assert oldest is not None
            self._window.remove(oldest)
            self._probation.append(oldest)

    def access(self, block: int) -> None:
        self._count(block)
        if block in self._probation:
            self._probation.remove(block)
            self._protected.append(block)
            if len(self._protected) > self._protected_capacity:
                oldest = self._protected.oldest()
                assert oldest is not None
                self._protected.remove(oldest)
                self._probation.append(oldest)
        else:
            (self._protected if block in self._protected else self._window).append(block)

    def _count(self, block: int) -> None:
        self._uses[block] = min(self._uses.get(block, 0) + 1, _MOST_USES)
        self._accesses += 1
        if self._accesses % self._sample == 0:
            self._uses = {block: uses // 2 for block, uses in self._uses.items() if uses > 1}

    def evictable(self, block: int) -> None:
        self._candidates.add(block)
        self._queue_of(block).offer(block)

    def held(self, block: int) -> None:
        self._candidates.discard(block)

    def _queue_of(self, block: int) -> BlockQueue:
        return next(queue for queue in (self._window, self._probation, self._protected) if block in queue)

    def victim(self) -> int:
        newcomer = self._window.oldest_candidate() if len(self._window) >= self._window_capacity else None
        settled = self._probation.oldest_candidate()
        if settled is None:
            settled = self._protected.oldest_candidate()
        if settled is None:
            settled = self._window.oldest_candidate()
            newcomer = None
        if settled is None:
            raise IndexError("no evictable block")
        loses = newcomer is not None and self._uses.get(newcomer, 0) <= self._uses.get(settled, 0)
        block = newcomer if newcomer is not None and loses else settled
        self._queue_of(block).remove(block)
        self._candidates.discard(block)
        if newcomer is not None and not loses:
            self._window.remove(newcomer)
            self._probation.append(newcomer)
        return block

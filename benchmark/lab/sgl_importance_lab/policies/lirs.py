"""LIRS: blocks used twice within a short stretch stay, all others pass through a short queue."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

from sgl_importance_lab.policies.base import EvictionPolicy
from sgl_importance_lab.policies.block_queue import BlockQueue


class LirsPolicy(EvictionPolicy):
    """Jiang, Zhang: LIRS: An Efficient Low Inter-reference Recency Set Replacement Policy to Improve Buffer
    Cache Performance, SIGMETRICS 2002.

    Blocks of low inter-reference recency (LIR) hold most of the cache; the others (HIR) pass through a queue
    from which victims are taken. The stack keeps all blocks used since the LIR block that was used the
    longest ago, evicted ones included: a HIR block that is used while it is in there becomes LIR, and that
    oldest LIR block becomes HIR. In a prefix tree a held block keeps its place; the victim is the oldest
    evictable block of the queue, or the evictable LIR block used the longest ago if the queue has only held
    blocks.

    Args:
        capacity: see ``EvictionPolicy``.
        passing: room for HIR blocks, as a part of the capacity; at least one block.
        history: evicted blocks on the stack, as a multiple of the capacity. The paper sets no limit; the
            default is that of libCacheSim's ``LIRS.c``.
    """

    name: ClassVar[str] = "lirs"

    def __init__(self, capacity: int, *, passing: float = 0.01, history: float = 1.0) -> None:
        super().__init__(capacity)
        assert 0 <= passing <= 1
        assert history >= 0
        self._lir_capacity = capacity - max(1, int(passing * capacity))
        self._history_capacity = int(history * capacity)
        self._candidates: set[int] = set()
        self._lir = BlockQueue(self._candidates)  # by last use, as on the stack
        self._passing = BlockQueue(self._candidates)
        self._stack: OrderedDict[int, None] = OrderedDict()  # last used last
        self._evicted: OrderedDict[int, None] = OrderedDict()  # those on the stack
        self._returns = False

    def miss(self, block: int) -> None:
        self._returns = block in self._evicted
        self._evicted.pop(block, None)

    def insert(self, block: int) -> None:
        if self._returns or len(self._lir) < self._lir_capacity:
            self._to_lir(block)
        else:
            self._passing.append(block)
            self._to_top(block)
        self._returns = False

    def access(self, block: int) -> None:
        if block in self._lir:
            self._to_top(block)
            self._lir.append(block)
            self._prune()
        elif block in self._stack:
            self._passing.remove(block)
            self._to_lir(block)
        else:
            self._passing.append(block)
            self._to_top(block)

    def _to_top(self, block: int) -> None:
        self._stack[block] = None
        self._stack.move_to_end(block)

    def _to_lir(self, block: int) -> None:
        self._to_top(block)
        self._lir.append(block)
        if len(self._lir) > self._lir_capacity:
            oldest = self._lir.oldest()
            assert oldest is not None
            self._lir.remove(oldest)
            del self._stack[oldest]
            self._passing.append(oldest)
        self._prune()

    def _prune(self) -> None:
        """Takes off the stack what was used before every LIR block."""
        while self._stack and (oldest := next(iter(self._stack))) not in self._lir:
            del self._stack[oldest]
            self._evicted.pop(oldest, None)

    def evictable(self, block: int) -> None:
        self._candidates.add(block)
        (self._lir if block in self._lir else self._passing).offer(block)

    def held(self, block: int) -> None:
        self._candidates.discard(block)

    def victim(self) -> int:
        block = self._passing.oldest_candidate()
        if block is not None:
            self._passing.remove(block)
            if block in self._stack:
                self._evicted[block] = None
        else:
            block = self._lir.oldest_candidate()
            if block is None:
                raise IndexError("no evictable block")
            self._lir.remove(block)
            del self._stack[block]
            self._prune()
        self._candidates.discard(block)
        if len(self._evicted) > self._history_capacity:
            forgotten, _ = self._evicted.popitem(last=False)
            del self._stack[forgotten]
        return block

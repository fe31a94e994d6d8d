"""Policies whose blocks have a rank: the evictable block of lowest rank goes first."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Generic, TypeVar

from sgl_importance_lab.policies.base import EvictionPolicy

__all__ = ["RankedBlocks", "RankedPolicy"]

Rank = float | tuple[float, ...]
RankT = TypeVar("RankT", bound=Rank)
_COMPACT_SLACK = 64


class RankedBlocks:
    """Evictable blocks by rank; equal ranks leave in the order in which blocks were numbered.

    A block that is held, or ranked anew, leaves a stale item in the heap that is skipped later: O(log n)
    amortised per event. The heap is rebuilt when most of it is stale, so memory is linear in the blocks.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int]] = []
        self._ranks: dict[int, Rank] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, block: int) -> bool:
        return block in self._ranks

    def add(self, block: int, rank: Rank) -> None:
        """Enters a block, or ranks it anew."""
        if self._ranks.get(block) == rank:
            return
        self._ranks[block] = rank
        if len(self._heap) > 2 * len(self._ranks) + _COMPACT_SLACK:
            self._heap = sorted((rank, block) for block, rank in self._ranks.items())
        else:
            heappush(self._heap, (rank, block))

    def discard(self, block: int) -> None:
        self._ranks.pop(block, None)

    def first(self) -> tuple[Rank, int] | None:
        """Lowest rank and its block, which stays; None if there is no block."""
        while self._heap:
            rank, block = self._heap[0]
            if self._ranks.get(block) == rank:
                return rank, block
            heappop(self._heap)
        return None

    def pop(self) -> int:
        """Removes and returns the block of lowest rank.

        Raises:
            IndexError: there is no block.
        """
        first = self.first()
        if first is None:
            raise IndexError("no evictable block")
        heappop(self._heap)
        del self._ranks[first[1]]
        return first[1]


class RankedPolicy(EvictionPolicy, Generic[RankT]):
    """Base of policies that say of each block in the cache, held or not, what its rank is."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._ranks: dict[int, RankT] = {}
        self._order = RankedBlocks()

    def _rank(self, block: int, rank: RankT) -> None:
        """Ranks a block in the cache, for the first time or anew."""
        self._ranks[block] = rank
        if block in self._order:
            self._order.add(block, rank)

    def _forget(self, block: int, rank: RankT) -> None:
        """The block is the victim; it had this rank."""

    def evictable(self, block: int) -> None:
        self._order.add(block, self._ranks[block])

    def held(self, block: int) -> None:
        self._order.discard(block)

    def victim(self) -> int:
        block = self._order.pop()
        self._forget(block, self._ranks.pop(block))
        return block

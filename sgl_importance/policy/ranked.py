"""The order of a policy whose blocks have a rank: the evictable block of lowest rank goes first."""

from __future__ import annotations

from heapq import heappop, heappush

Rank = float | tuple[float, ...]
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

"""A queue of blocks in which those that are held keep their place and are passed over."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from heapq import heappop, heappush

_COMPACT_SLACK = 64


class BlockQueue:
    """Blocks, oldest first. O(log n) amortised per event, however many held blocks stand at the front.

    Args:
        candidates: the policy's evictable blocks, shared by its queues and kept by the policy; it calls
            ``offer`` after adding a block to it.
    """

    def __init__(self, candidates: Set[int]) -> None:
        self._candidates = candidates
        self._places: OrderedDict[int, int] = OrderedDict()
        self._heap: list[tuple[int, int]] = []  # (place, block) of candidates, some of them stale
        self._next_place = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, block: int) -> bool:
        return block in self._places

    def append(self, block: int) -> None:
        """Puts a block at the end, whether it was in the queue or not."""
        self._next_place += 1
        if block in self._places:
            self._places.move_to_end(block)
        self._places[block] = self._next_place
        if block in self._candidates:
            self._push(block)

    def offer(self, block: int) -> None:
        """A block of the queue became a candidate."""
        self._push(block)

    def remove(self, block: int) -> None:
        del self._places[block]

    def oldest(self) -> int | None:
        """The block at the front, held or not; None in an empty queue."""
        return next(iter(self._places), None)

    def oldest_candidate(self) -> int | None:
        """The evictable block nearest to the front, which stays; None if every block is held."""
        heap, places, candidates = self._heap, self._places, self._candidates
        while heap:
            place, block = heap[0]
            if block in candidates and places.get(block) == place:
                return block
            heappop(heap)
        return None

    def _push(self, block: int) -> None:
        if len(self._heap) > 2 * len(self._places) + _COMPACT_SLACK:
            live = {item for item in self._heap if item[1] in self._candidates}
            self._heap = sorted(item for item in live if self._places.get(item[1]) == item[0])
        heappush(self._heap, (self._places[block], block))

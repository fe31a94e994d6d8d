"""How soon pages of a chain are asked for again, and which of a tier's pages that holds for least."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Protocol

from sgl_importance.policy.victim_order import VictimOrder
from sgl_importance.reuse.estimator import ReuseEstimator

_COMPACT_SLACK = 64


class Ranking(Protocol):
    """The order of the pages that may leave each tier. Pages are known by numbers."""

    def use(self, page: int) -> None:
        """A sequence through the page was read or written; of one sequence, its last page is told first."""
        ...

    def rate(self, page: int) -> float:
        """Predicted uses of a page per unit of time, on one scale for all pages."""
        ...

    def enter(self, level: int, page: int) -> None:
        """The page may leave the tier, or its facts changed while it might."""
        ...

    def leave(self, level: int, page: int) -> None:
        """The page may not leave the tier any more; it need not have entered."""
        ...

    def cheapest(self, level: int) -> int | None:
        """The page of the least rate among those that may leave the tier."""
        ...

    def forget(self, page: int) -> None:
        """The page is in no tier any more."""
        ...


class LruRanking:
    """Least recently used: a page's rate is the serial number of its last use."""

    def __init__(self, levels: int) -> None:
        self._used: dict[int, int] = {}
        self._serial = 0
        self._heaps: list[list[tuple[int, int]]] = [[] for _ in range(levels)]
        self._entered: list[dict[int, int]] = [{} for _ in range(levels)]

    def use(self, page: int) -> None:
        self._serial += 1
        self._used[page] = self._serial

    def rate(self, page: int) -> float:
        return float(self._used.get(page, 0))

    def enter(self, level: int, page: int) -> None:
        used = self._used.get(page, 0)
        entered, heap = self._entered[level], self._heaps[level]
        if entered.get(page) == used:
            return
        entered[page] = used
        heappush(heap, (used, page))
        if len(heap) > 2 * len(entered) + _COMPACT_SLACK:
            heap[:] = [(serial, each) for each, serial in entered.items()]
            heapify(heap)

    def leave(self, level: int, page: int) -> None:
        self._entered[level].pop(page, None)

    def cheapest(self, level: int) -> int | None:
        entered, heap = self._entered[level], self._heaps[level]
        while heap and entered.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][1] if heap else None

    def forget(self, page: int) -> None:
        self._used.pop(page, None)


class ReuseRanking:
    """Predicted reuse by class and age, as the device ranks nodes (``sgl_importance.policy``).

    Args:
        reuse: its clock and index rank the pages; nothing here changes it.
        unseen_class: class of a page of which nothing was told.
    """

    def __init__(self, levels: int, reuse: ReuseEstimator, *, unseen_class: int) -> None:
        self._reuse = reuse
        self._unseen_class = unseen_class
        self._facts: dict[int, tuple[int, int]] = {}
        self._orders = [VictimOrder(reuse) for _ in range(levels)]

    def visited(self, page: int, reuse_class: int, last_access: int) -> None:
        """A request asked for the page at clock ``last_access``, after which it is of this class."""
        self._facts[page] = (reuse_class, last_access)

    def use(self, page: int) -> None:
        """What is known of a page comes from requests: of one that none was told of, only when it came."""
        if page not in self._facts:
            self.visited(page, self._unseen_class, self._reuse.clock)

    def rate(self, page: int) -> float:
        reuse_class, last_access = self._facts.get(page, (self._unseen_class, 0))
        return self._reuse.index(reuse_class, self._reuse.clock - last_access)

    def enter(self, level: int, page: int) -> None:
        reuse_class, last_access = self._facts.get(page, (self._unseen_class, 0))
        self._orders[level].add(page, reuse_class, 1.0, last_access)

    def leave(self, level: int, page: int) -> None:
        self._orders[level].discard(page)

    def cheapest(self, level: int) -> int | None:
        return self._orders[level].peek()

    def forget(self, page: int) -> None:
        self._facts.pop(page, None)

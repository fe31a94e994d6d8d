"""Policies whose ranks change as time goes by, but within a category never their order."""

from __future__ import annotations

from abc import abstractmethod
from heapq import heapify, heappop, heappush

from sgl_importance_lab.policies.base import EvictionPolicy
from sgl_importance_lab.policies.ranked import Rank, RankedBlocks
from sgl_importance_lab.policies.session_requests import SessionRequests


class RerankedPolicy(EvictionPolicy):
    """Base of policies that rank a block by the last request that used it, and by the time since then.

    Each category of requests has a queue of its blocks, least recently used first and of one request the
    deepest. When a request evicts, only the heads of the queues are ranked.

    Args:
        capacity: see ``EvictionPolicy``.
        requests: of the very trace that is replayed; only its past is used at any moment.
    """

    def __init__(self, capacity: int, requests: SessionRequests) -> None:
        super().__init__(capacity)
        self._requests = requests
        self._request = 0
        self._now = 0.0
        self._position = 0
        self._last_uses: dict[int, tuple[int, int]] = {}  # request, -position in it
        self._queues: dict[int, RankedBlocks] = {}  # by category, none empty
        self._heads: list[tuple[Rank, tuple[int, int], int]] | None = None  # a heap while a request evicts

    @abstractmethod
    def _category(self, request: int) -> int:
        """Of what this request was the last to use; it never changes."""

    @abstractmethod
    def _rank(self, request: int) -> Rank:
        """Of what this request was the last to use, now; lowest goes first, and in a category the oldest."""

    def begin_request(self, request: int) -> None:
        self._request = request
        self._now = float(self._requests.seconds[request])
        self._position = 0
        self._heads = None

    def insert(self, block: int) -> None:
        self._last_uses[block] = self._request, -self._position
        self._position += 1

    def access(self, block: int) -> None:
        request, _ = self._last_uses[block]
        is_candidate = block in self._queues.get(self._category(request), ())
        if is_candidate:  # in object-level replay nothing is held
            self.held(block)
        self.insert(block)
        if is_candidate:
            self.evictable(block)

    def evictable(self, block: int) -> None:
        last_use = self._last_uses[block]
        category = self._category(last_use[0])
        self._queues.setdefault(category, RankedBlocks()).add(block, last_use)
        self._offer(category)

    def held(self, block: int) -> None:
        category = self._category(self._last_uses[block][0])
        self._queues[category].discard(block)
        if not self._queues[category]:
            del self._queues[category]
        self._offer(category)  # in object-level replay a request that evicts goes on

    def victim(self) -> int:
        if self._heads is None:
            self._heads = [head for category in self._queues for head in [self._head(category)] if head]
            heapify(self._heads)
        while True:
            head = heappop(self._heads)
            category = head[2]
            if self._head(category) == head:
                break
        block = self._queues[category].pop()
        if not self._queues[category]:
            del self._queues[category]
        self._offer(category)
        request, _ = self._last_uses.pop(block)
        self._forget(request)
        return block

    def _head(self, category: int) -> tuple[Rank, tuple[int, int], int] | None:
        """Rank and last use of the first block of a queue; None if there is no such queue."""
        queue = self._queues.get(category)
        first = queue.first() if queue is not None else None
        if first is None:
            return None
        last_use = self._last_uses[first[1]]
        return self._rank(last_use[0]), last_use, category

    def _offer(self, category: int) -> None:
        head = self._head(category) if self._heads is not None else None
        if self._heads is not None and head is not None:
            heappush(self._heads, head)

    def _forget(self, request: int) -> None:
        """The victim is a block of which this request was the last user."""

"""A queue between the scheduler and the writer that never makes the scheduler wait."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class BoundedQueue(Generic[T]):
    """First in, first out, bounded in bytes; what does not fit is refused and counted.

    Args:
        max_bytes: of all items that wait.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._refused = 0
        self._closed = False
        self._changed = threading.Condition(threading.Lock())

    def offer(self, item: T, num_bytes: int) -> bool:
        """Adds an item unless it does not fit or the queue is closed; never waits for the reader."""
        with self._changed:
            if self._closed or self._bytes + num_bytes > self._max_bytes:
                self._refused += 1
                return False
            self._items.append((item, num_bytes))
            self._bytes += num_bytes
            self._changed.notify()
            return True

    def take(self, seconds: float | None = None) -> tuple[list[T], int] | None:
        """Waits for items and takes all of them, with the number refused since the last call.

        Args:
            seconds: longest wait; after it there may be no items. None waits for as long as it takes.

        Returns:
            None once the queue is closed and empty.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._refused or self._closed, seconds)
            if self._closed and not self._items and not self._refused:
                return None
            items = [item for item, _ in self._items]
            refused, self._refused = self._refused, 0
            self._items.clear()
            self._bytes = 0
            return items, refused

    def close(self) -> None:
        """Refuses what comes from now on; what waits can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

"""A thread that takes what others hand over, all that waits at once."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[list[T], int], None]


class BatchWorker(Generic[T]):
    """A queue, first in, first out, bounded in bytes, and the daemon thread that empties it.

    Who offers an item never waits and sees no exception: what does not fit is refused and counted. An
    exception of the work ends the thread: it is logged once, and all that comes later is refused. (An
    executor of the standard library bounds nothing, takes one item at a time, and would hold up the end of a
    process whose thread hangs.)

    Args:
        name: of the thread.
        work: called on the thread with the items that wait, in their order, and the number refused since the
            last call. It is called without items, too: after ``idle_seconds``, and once at the end.
        max_bytes: of all items that wait.
        last_words: logged, with its traceback, for the exception that ends the thread.
        batch_items: the most that one call of ``work`` gets.
        idle_seconds: longest time between two calls; None for as long as nothing comes.
        pause_seconds: from one call to the next, so that batches grow; a close ends it.
        resource: entered before the first call; left after the last one, or with the exception of ``work``.
    """

    def __init__(
        self,
        name: str,
        work: Work[T],
        *,
        max_bytes: int,
        last_words: str,
        batch_items: int | None = None,
        idle_seconds: float | None = None,
        pause_seconds: float = 0.0,
        resource: AbstractContextManager[object] | None = None,
    ) -> None:
        self._work = work
        self._max_bytes = max_bytes
        self._last_words = last_words
        self._batch_items = batch_items
        self._idle_seconds = idle_seconds
        self._pause_seconds = pause_seconds
        self._resource = resource or nullcontext()
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._refused = 0
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self.dropped = 0
        """Items that were refused since the start, or waited when the thread failed."""
        self.unfinished = 0
        """Items that wait or are being worked on."""
        self.has_failed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begins; what was offered before is worked on."""
        self._thread.start()

    def offer(self, item: T, num_bytes: int) -> bool:
        """Hands an item over; False where it does not fit, or comes after the close or a failure."""
        with self._changed:
            if self._closing.is_set() or self._bytes + num_bytes > self._max_bytes:
                self._refused += 1
                self.dropped += 1
                return False
            self._items.append((item, num_bytes))
            self._bytes += num_bytes
            self.unfinished += 1
            self._changed.notify_all()
            return True

    @property
    def is_closing(self) -> bool:
        """Whether nothing more is taken in."""
        return self._closing.is_set()

    def take_no_more(self, *, failed: bool = False) -> None:
        """Refuses what comes from now on, and waits for nothing: what is there is worked through.

        Args:
            failed: the thread is at its end, and what is there is dropped.
        """
        with self._changed:
            self._closing.set()
            if failed:
                self.has_failed = True
                self.dropped += len(self._items)
                self._items.clear()
            self._changed.notify_all()

    def close(self, seconds: float | None = None) -> None:
        """Refuses what comes from now on and waits until what is there is worked through.

        Args:
            seconds: the longest wait; None waits for as long as it takes.
        """
        self.take_no_more()
        self._thread.join(seconds)

    # ---- the thread ----

    def _run(self) -> None:
        try:
            with self._resource:
                while (taken := self._take()) is not None:
                    self._work(*taken)
                    self._finished(len(taken[0]))
                    self._closing.wait(self._pause_seconds)
                self._work([], 0)
        except Exception:
            logger.exception(self._last_words)
            self.take_no_more(failed=True)

    def _take(self) -> tuple[list[T], int] | None:
        """Items, and the number refused since the last call; None once closed and empty."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._items or self._refused or self._closing.is_set(), self._idle_seconds
            )
            if self._closing.is_set() and not self._items and not self._refused:
                return None
            count = min(len(self._items), self._batch_items or len(self._items))
            taken = [self._items.popleft() for _ in range(count)]
            self._bytes -= sum(num_bytes for _, num_bytes in taken)
            refused, self._refused = self._refused, 0
            return [item for item, _ in taken], refused

    def _finished(self, count: int) -> None:
        with self._changed:
            self.unfinished -= count

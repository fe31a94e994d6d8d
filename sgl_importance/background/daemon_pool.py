"""Threads that may hang in a disk without anybody waiting for them."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

logger = logging.getLogger(__name__)

Call = Callable[[], None]
MOST_GIVEN_UP = 8


class DaemonPool:
    """Daemon threads that run calls in order of arrival; whoever asked may stop waiting at any time.

    Unlike an executor of the standard library, a process can end while one of them hangs in the kernel. When
    a call comes and a thread has hung for longer than ``patience``, another takes its place, and it ends as
    soon as its own call does. While ``MOST_GIVEN_UP`` hang, no more are replaced: it is the disk as a whole.

    Args:
        threads: that take calls.
        name: of the threads.
        patience: seconds.
        most_waiting: calls that may wait for a thread; of more, the oldest are dropped.
        on_given_up: called for each thread that is given up.
    """

    def __init__(
        self,
        threads: int,
        name: str,
        *,
        patience: float = math.inf,
        most_waiting: float = math.inf,
        on_given_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._patience = patience
        self._most_waiting = most_waiting
        self._on_given_up = on_given_up
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._given_up: set[_Worker] = set()
        self._taking = [self._start() for _ in range(threads)]

    def submit(self, call: Call) -> None:
        """Runs ``call``, which must not raise, unless too many come behind it first."""
        self._replace_hung()
        self._calls.put(call)
        while self._calls.qsize() > self._most_waiting:
            with suppress(queue.Empty):  # a thread has just taken one
                self._calls.get_nowait()

    def hung(self) -> list[Call]:
        """What the threads that were given up still do."""
        with self._lock:
            return [worker.call for worker in self._given_up if worker.call is not None]

    def close(self) -> None:
        """Lets the threads end after what has been submitted; waits for none."""
        for _ in self._taking:
            self._calls.put(None)

    def _start(self) -> _Worker:
        worker = _Worker()
        thread = threading.Thread(target=self._work, args=(worker,), name=self._name, daemon=True)
        thread.start()
        return worker

    def _work(self, worker: _Worker) -> None:
        while (call := self._calls.get()) is not None:
            worker.begin(call)
            call()
            with self._lock:
                worker.call = None
                if worker in self._given_up:
                    self._given_up.remove(worker)
                    return

    def _replace_hung(self) -> None:
        latest = time.monotonic() - self._patience
        if not any(worker.hangs_since(latest) for worker in self._taking):
            return
        with self._lock:
            for place, worker in enumerate(self._taking):
                if worker.hangs_since(latest) and len(self._given_up) < MOST_GIVEN_UP:
                    self._give_up(worker)
                    self._taking[place] = self._start()

    def _give_up(self, worker: _Worker) -> None:
        if not self._given_up:
            logger.warning(
                "%s: a thread has hung for %.0f s: look after the disk; what it was to do is left undone, "
                "and others take the place of at most %d such threads",
                self._name,
                time.monotonic() - worker.since,
                MOST_GIVEN_UP,
            )
        self._given_up.add(worker)
        self._on_given_up()


class _Worker:
    """What one thread does now, and since when by ``time.monotonic``."""

    def __init__(self) -> None:
        self.call: Call | None = None
        self.since = 0.0

    def begin(self, call: Call) -> None:
        self.since = time.monotonic()  # first: others look at both
        self.call = call

    def hangs_since(self, latest: float) -> bool:
        return self.call is not None and self.since <= latest

"""Threads that may get stuck in a read without anybody waiting for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Workers:
    """Daemon threads that run calls in order of arrival; whoever asked may stop waiting at any time.

    Unlike an executor of the standard library, a process can end while one of them hangs in the kernel.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        """Runs ``call``, which must not raise."""
        self._calls.put(call)

    def close(self) -> None:
        """Lets the threads end after what has been submitted; waits for none."""
        for _ in self._threads:
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

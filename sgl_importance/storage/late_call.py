"""A call that was not back in time, and those that come while it hangs."""

from __future__ import annotations

import queue
import time
from typing import Any


class LateCall:
    """While one call hangs, the next of its kind are not worth a wait each.

    One is tried after ``seconds``, by when another thread has taken the place of the one that hangs.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end: queue.SimpleQueue[Any] | None = None
        self._until = 0.0

    def note(self, end: queue.SimpleQueue[Any]) -> None:
        """A call is late; at its end, something is put where nobody takes it any more."""
        self._end, self._until = end, time.monotonic() + self._seconds

    def hangs(self) -> bool:
        return self._end is not None and self._end.empty() and time.monotonic() < self._until

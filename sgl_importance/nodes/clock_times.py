"""When each request was admitted: from the clock that policies count by to seconds, in bounded memory."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable

MAX_TIMES = 4096


class ClockTimes:
    """Times of the clock's ticks. Of old ones every second is forgotten when there are too many.

    Args:
        now: seconds, of a clock that does not go back.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._clocks: list[int] = []
        self._seconds: list[float] = []

    def tick(self, clock: int) -> None:
        """The clock, in admitted requests, has come to this value."""
        self._clocks.append(clock)
        self._seconds.append(self._now())
        if len(self._clocks) > MAX_TIMES:
            old = MAX_TIMES // 2  # of the newest all are kept: an error counts beside a short age
            self._clocks[:old] = self._clocks[:old:2]
            self._seconds[:old] = self._seconds[:old:2]

    def age(self, clock: int) -> float | None:
        """Seconds since the clock had this value; None of before the first tick."""
        place = bisect_right(self._clocks, clock)
        return self._now() - self._seconds[place - 1] if place else None

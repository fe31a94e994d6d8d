"""Unix time for lifetimes, which no correction of the wall clock shortens or stretches."""

from __future__ import annotations

import time

_BOOTED = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def steady_time() -> float:
    """Seconds since 1970: as the wall clock had it when this process began, and on from there without jumps.

    Time for which the machine is suspended counts.
    """
    return _BOOTED + time.clock_gettime(time.CLOCK_BOOTTIME)

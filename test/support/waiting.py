"""Waiting for what another thread or process will do."""

from __future__ import annotations

import time
from collections.abc import Callable

HANG_SECONDS = 60.0
"""After which a test gives up. Nothing is said about how long something may take."""


def wait_until(
    holds: Callable[[], object], *, seconds: float = HANG_SECONDS, look_every: float = 0.02
) -> None:
    """Raises AssertionError where it does not come to hold."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s"
        time.sleep(look_every)

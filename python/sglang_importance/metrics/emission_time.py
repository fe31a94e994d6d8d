"""The time that page scores cost the thread that launches forward passes."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class EmissionTime:
    """Sums since the source of scores was made; written and read by the scheduler thread.

    On an accelerator this is the time to launch kernels, not the time that they run.

    Attributes:
        passes: forward passes that observed some request.
        seconds: host time spent on them.
    """

    passes: int = 0
    seconds: float = 0.0

    _start: float = 0.0

    def measured(self) -> EmissionTime:
        """Adds the time of the ``with`` block that it opens; blocks do not nest."""
        return self

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds += time.perf_counter() - self._start

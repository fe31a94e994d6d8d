"""What page scores cost the thread that launches forward passes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class EmissionTime:
    """Sums since the process began; written and read by the scheduler thread.

    On an accelerator this is the time to launch kernels, not the time that they run.

    Attributes:
        passes: forward passes that observed some request.
        seconds: host time spent on them.
    """

    passes: int = 0
    seconds: float = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start


EMISSION_TIME = EmissionTime()

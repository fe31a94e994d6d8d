"""How many pages were read, and where from."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class PageTraffic:
    """Counts since the start; a page that every layer reads counts once for each layer.

    Attributes:
        read: pages that attention asked for.
        loaded: those that came from the host.
        written: pages that went to the host.
        candidates: pages that a selector chose from.
        selected: those that it chose.
        loaded_bytes: of the pages that came from the host.
        load_seconds: that attention waited for copies of them.
    """

    read: int = 0
    loaded: int = 0
    written: int = 0
    candidates: int = 0
    selected: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0

    def add_loads(self, num_pages: int, page_bytes: int) -> None:
        """Pages came from the host, in copies or as attention read them there."""
        self.loaded += num_pages
        self.loaded_bytes += num_pages * page_bytes

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Takes the time of the copies from the host that are made inside."""
        start = time.perf_counter()
        yield
        self.load_seconds += time.perf_counter() - start

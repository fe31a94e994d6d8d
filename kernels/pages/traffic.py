"""How many pages were read, and where from."""

from __future__ import annotations

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
    """

    read: int = 0
    loaded: int = 0
    written: int = 0
    candidates: int = 0
    selected: int = 0

"""The bound on bytes per second that promotions and demotions may write into a tier."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

BURST_SECONDS = 1.0
"""What a tier may take at once after a rest."""


class MoveBudget:
    """A token bucket for each tier; time is the caller's, in seconds, and never runs backwards.

    Args:
        tiers: their number.
        bytes_per_second: into each of them; inf for no bound.
        page_bytes: which a tier may take at once however low the bound is, or nothing would ever move.
    """

    def __init__(self, tiers: int, bytes_per_second: float = inf, *, page_bytes: int = 1) -> None:
        self._speed = bytes_per_second
        self._burst = max(bytes_per_second * BURST_SECONDS, float(page_bytes))
        self._left = [self._burst] * tiers
        self._now = [0.0] * tiers

    def affords(self, amounts: Mapping[int, int], now: float) -> bool:
        """Whether so many bytes may be written into each of these tiers now."""
        if self._speed == inf:
            return True
        for level in amounts:
            passed = max(now - self._now[level], 0.0)
            self._left[level] = min(self._left[level] + passed * self._speed, self._burst)
            self._now[level] = max(now, self._now[level])
        return all(self._left[level] >= size for level, size in amounts.items())

    def spend(self, level: int, size: int) -> None:
        """So many bytes are written into the tier."""
        if self._speed != inf:
            self._left[level] -= size

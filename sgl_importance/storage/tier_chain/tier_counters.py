"""Counts by tier; any thread may count."""

from __future__ import annotations

import threading
from collections import Counter

# name -> help; the label of each is the tier
TIER_SERIES: dict[str, str] = {
    "hit_pages": "Pages that were read from the tier and verified",
    "stored_pages": "New pages that were stored in the tier",
    "promoted_pages": "Pages that left the tier for a faster one",
    "demoted_pages": "Pages that left the tier for a slower one, to make room",
    "evicted_pages": "Pages that the last tier gave up to make room",
    "damaged_pages": "Pages of the tier that failed a check",
    "failed_accesses": "Accesses that the tier refused",
    "times_left_out": "Times that the tier was left out after failures in a row",
    "times_come_back": "Times that it was taken back",
}


class TierCounters:
    """Monotone counts by name and tier."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, tier: str, amount: int = 1) -> None:
        assert name in TIER_SERIES, name
        with self._lock:
            self._values[name, tier] += amount

    def values(self) -> dict[tuple[str, str], int]:
        """Every count that is not zero."""
        with self._lock:
            return dict(self._values)

    def __getitem__(self, name: str) -> int:
        """The count of a name over all tiers."""
        return sum(value for (key, _), value in self.values().items() if key == name)

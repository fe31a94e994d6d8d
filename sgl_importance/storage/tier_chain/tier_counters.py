"""Counts by tier; any thread may count."""

from __future__ import annotations

from sgl_importance.storage.store_counters import StoreCounters

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


class TierCounters(StoreCounters):
    """Monotone counts by name and tier."""

    labels = dict.fromkeys(TIER_SERIES, "tier")

"""A server's options in the header of a recording: one flat record, by the names of the first release.

Recordings outlast releases, so the names that studies read stay as they were when options had no groups.
"""

from __future__ import annotations

from typing import Any

from sgl_importance.options.importance_options import SETTINGS, ImportanceOptions

_WITHOUT_GROUP = ("", "signal")
_NAMES = {
    "pins.budget": "pin_budget",
    "trace.directory": "trace",
    "store.directory": "store",
    "store.max_bytes": "store_bytes",
    "store.tiers": "tiers",
    "store.fetch_timeout_ms": "fetch_timeout_ms",
    "ledger.place": "ledger",
    "prewarm.at": "prewarm",
    "tiered.residency": "residency",
    "tiered.device_tokens": "device_tokens",
}


def recorded_options(options: ImportanceOptions) -> dict[str, Any]:
    """Every option by the name that it has in recordings, such as ``window`` or ``sparse_budget``."""
    return {_recorded_name(place): options.at(place) for place in SETTINGS}


def _recorded_name(place: str) -> str:
    group, _, name = place.rpartition(".")
    return _NAMES.get(place) or (name if group in _WITHOUT_GROUP else f"{group}_{name}")

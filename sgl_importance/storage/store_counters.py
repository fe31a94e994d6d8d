"""Counters of a store's pages, by reason; any thread may count."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from sgl_importance.storage.page_record import MissReason
from sgl_importance.storage.pages import WRITE_REASONS

# name -> (help, label)
SERIES: dict[str, tuple[str, str | None]] = {
    "read_pages": ("Pages read from storage and verified", None),
    "read_bytes": ("Bytes of verified pages", None),
    "missed_pages": (
        "Pages at which storage stopped serving a prompt, by the reason; those behind are computed, too",
        "reason",
    ),
    "quarantined_pages": ("Pages that failed a check and were set aside", None),
    "written_pages": ("Pages written to storage", None),
    "written_bytes": ("Bytes of pages written", None),
    "unwritten_pages": ("Pages that could not be written, by the reason", "reason"),
    "lost_directories": ("Times that the directory had vanished and was made again", None),
    "neighbours": ("Other processes that began to use the directory", None),
    "lost_neighbours": ("Of these, processes that ended without leaving it, as a killed one does", None),
    "evicted_pages": ("Pages deleted to keep the byte budget", None),
    "thread_faults": ("Exceptions contained in a storage thread, by the thread", "thread"),
    "replaced_threads": ("Threads that hung in the storage and were given up for new ones", "thread"),
    "overdue_prefetches": ("Requests that stopped waiting for a prefetch", None),
    "weight_updates": ("Updates of the weights, each of which starts a new key space", None),
}

LABEL_VALUES: dict[str, tuple[str, ...]] = {
    "missed_pages": tuple(reason.value for reason in MissReason),
    "unwritten_pages": (*dict.fromkeys(WRITE_REASONS.values()), "timeout", "error", MissReason.WEIGHTS.value),
    "replaced_threads": ("look", "read", "write", "leisure"),
    "thread_faults": ("prefetch", "prefetch_io", "prefetch_sync", "backup"),
}
"""Label values that are known ahead; any other error of the system is named after it."""


class StoreCounters:
    """Monotone counts by name and label.

    Attributes:
        labels: what each name is counted by; None for a single count.
    """

    labels: Mapping[str, str | None] = {name: label for name, (_, label) in SERIES.items()}

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[tuple[str, str | None]] = Counter()

    def add(self, name: str, label: str | None = None, amount: int = 1) -> None:
        assert (self.labels[name] is None) == (label is None), f"{name}: wrong label {label}"
        with self._lock:
            self._values[name, label] += amount

    def values(self) -> dict[tuple[str, str | None], int]:
        """Every count that is not zero."""
        with self._lock:
            return dict(self._values)

    def __getitem__(self, name: str) -> int:
        """The count of a name over all its labels."""
        return sum(value for (key, _), value in self.values().items() if key == name)

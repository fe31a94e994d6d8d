"""The store's counters on the server's own ``/metrics``."""

from __future__ import annotations

import os
import threading

from sgl_importance.storage.counters import SERIES, StoreCounters
from sglang_importance.metrics import PREFIX

STORE_PREFIX = f"{PREFIX}store_"


class StorePublisher:
    """Adds what was counted since the last call to Prometheus counters; any thread may call."""

    def __init__(self) -> None:
        # Imported here: the library reads PROMETHEUS_MULTIPROC_DIR at import, and the launcher sets it late.
        from prometheus_client import Counter

        self._lock = threading.Lock()
        self._published: dict[tuple[str, str | None], int] = {}
        self._series = {
            name: Counter(f"{STORE_PREFIX}{name}_total", help_text, [label] if label else [])
            for name, (help_text, label) in SERIES.items()
        }

    @classmethod
    def create(cls, *, enabled: bool) -> StorePublisher | None:
        """The process's publisher where the server exports metrics, else None."""
        global _publisher
        if not enabled or "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return None
        # One for all backends that are attached in turn: a series can be registered once.
        if _publisher is None:
            _publisher = cls()
        return _publisher

    def publish(self, counters: StoreCounters) -> None:
        with self._lock:
            for (name, label), value in counters.values().items():
                increment = value - self._published.get((name, label), 0)
                if increment:
                    series = self._series[name] if label is None else self._series[name].labels(label)
                    series.inc(increment)
                    self._published[name, label] = value


_publisher: StorePublisher | None = None


def publish_now(counters: StoreCounters) -> None:
    """Publishes where a publisher is in use."""
    if _publisher is not None:
        _publisher.publish(counters)

"""The store's counters on the server's own ``/metrics``."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from sgl_importance.metrics_table import STORE, TIER, Process, of_process
from sgl_importance.storage.store_counters import StoreCounters
from sgl_importance.storage.tier_chain.tier_counters import TierCounters
from sglang_importance.metrics.exposition import Exposition, metrics_are_shared


class StorePublisher:
    """Adds what was counted since the last call to Prometheus counters; any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._published: dict[tuple[str, str | None], int] = {}
        self._exposition = Exposition(of_process(Process.STORE))

    @classmethod
    def create(cls, *, enabled: bool) -> StorePublisher | None:
        """The process's publisher where the server exports metrics, else None."""
        global _publisher
        if not enabled or not metrics_are_shared():
            return None
        # One for all backends that are attached in turn: a series can be registered once.
        if _publisher is None:
            _publisher = cls()
        return _publisher

    def publish(self, counters: StoreCounters) -> None:
        self._publish(STORE, counters.values().items())

    def publish_tiers(self, counters: TierCounters) -> None:
        self._publish(TIER, counters.values().items())

    def _publish(self, family: str, values: Iterable[tuple[tuple[str, str | None], int]]) -> None:
        with self._lock:
            for (name, label), value in values:
                increment = value - self._published.get((family + name, label), 0)
                if increment:
                    labels = () if label is None else (label,)
                    self._exposition.increase(f"{family}{name}_total", labels, increment)
                    self._published[family + name, label] = value


_publisher: StorePublisher | None = None


def publish_now(counters: StoreCounters) -> None:
    """Publishes where a publisher is in use."""
    if _publisher is not None:
        _publisher.publish(counters)

"""What a scheduler adds to its series at each publication, without a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from sgl_importance.metrics_table import Metric
from sgl_importance.tiers import Tier
from sglang_importance.metrics import publisher
from sglang_importance.metrics.publisher import MetricsPublisher
from sglang_importance.metrics.scheduler_counters import Counters


class Series:
    """In place of the exposition: the values that a scrape would see, and what was written for them."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self.values: Counter[tuple[str, ...]] = Counter()
        self.writes: list[tuple[str, ...]] = []

    def increase(self, name: str, labels: tuple[str, ...], amount: float) -> None:
        assert amount > 0, "a counter of Prometheus raises at less"
        self.values[name, *labels] += amount
        self.writes.append((name, *labels))

    def set(self, name: str, labels: tuple[str, ...], value: float) -> None:
        self.values[name, *labels] = value
        self.writes.append((name, *labels))


def test_counts_are_added_once_and_gauges_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "Exposition", Series)
    published = MetricsPublisher()
    series: Series = published._exposition  # type: ignore[assignment]
    counters, gauges = Counters(), {"nodes": {(): 3.0}, "used_tokens": {Tier.DEVICE: 10.0}}
    counters.requests, counters.hit_tokens[Tier.HOST] = 5, 7
    published.publish(counters, gauges)
    published.publish(counters, gauges)
    counters.requests += 2
    published.publish(counters, {**gauges, "nodes": {(): 1.0}})
    assert series.values["requests_total",] == 7
    assert series.values["hit_tokens_total", Tier.HOST] == 7
    assert (series.values["nodes",], series.values["used_tokens", Tier.DEVICE]) == (1, 10)
    written = Counter(series.writes)
    assert (written["requests_total",], written["hit_tokens_total", Tier.HOST]) == (2, 1)
    assert (written["nodes",], written["used_tokens", Tier.DEVICE]) == (2, 1)

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

    def add_weights(self, name: str, labels: tuple[str, ...], weights: list[int], total: float) -> None:
        assert min(weights) >= 0, "a bucket of Prometheus only grows"
        for bucket, weight in enumerate(weights):
            self.values[name, *labels, str(bucket)] += weight
        self.values[name, *labels, "sum"] += total
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


def test_histograms_grow_by_what_came_since(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "Exposition", Series)
    published = MetricsPublisher()
    series: Series = published._exposition  # type: ignore[assignment]
    counters = Counters()
    published.publish(counters, {})
    counters.ages.reuses[Tier.DEVICE].add(2, 16)
    published.publish(counters, {})
    published.publish(counters, {})
    counters.ages.reuses[Tier.DEVICE].add(2, 4)
    counters.ages.reuses[Tier.DEVICE].add(1000, 1)
    published.publish(counters, {})
    grown = {
        key[2:]: value for key, value in series.values.items() if key[:2] == ("eviction_reuses", Tier.DEVICE)
    }
    assert {key: value for key, value in grown.items() if value} == {("2",): 20, ("9",): 1, ("sum",): 1040}
    assert Counter(series.writes)["eviction_reuses", Tier.DEVICE] == 3


def test_a_weighted_histogram_is_exported_as_prometheus_has_it() -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    from sglang_importance.metrics.weighted_histogram import WeightedHistogram

    registry = CollectorRegistry()
    family = WeightedHistogram("age", "Ages", ["tier"], buckets=(1, 10), registry=registry)
    family.labels("device").add([5, 0, 2], 70.5)
    family.labels("device").add([0, 1, 0], 4)
    lines = generate_latest(registry).decode().splitlines()
    assert 'age_bucket{le="1.0",tier="device"} 5.0' in lines
    assert 'age_bucket{le="10.0",tier="device"} 6.0' in lines
    assert 'age_bucket{le="+Inf",tier="device"} 8.0' in lines
    assert 'age_count{tier="device"} 8.0' in lines
    assert 'age_sum{tier="device"} 74.5' in lines

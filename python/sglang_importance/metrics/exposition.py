"""Registers series with the Prometheus client of this process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from sgl_importance.metrics_table import Kind, Metric

Series = tuple[str, tuple[str, ...]]
"""Name and label values."""


def metrics_are_shared() -> bool:
    """Whether this server's processes export metrics together."""
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ


class Exposition:
    """The series of some metrics; every label value that is known ahead is exported from the start, at zero.

    Args:
        metrics: rows of the table; a process can register each once.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._families = {metric.name: _register(metric) for metric in metrics}
        self._children: dict[Series, Any] = {}
        for metric in metrics:
            for values in metric.children():
                self._bind(metric.name, values)

    def increase(self, name: str, labels: tuple[str, ...], amount: float) -> None:
        self._bind(name, labels).inc(amount)

    def add_weights(self, name: str, labels: tuple[str, ...], weights: Sequence[float], total: float) -> None:
        """What the buckets of a histogram, and the sum of its values, have grown by."""
        self._bind(name, labels).add(weights, total)

    def set(self, name: str, labels: tuple[str, ...], value: float) -> None:
        self._bind(name, labels).set(value)

    def _bind(self, name: str, labels: tuple[str, ...]) -> Any:
        child = self._children.get((name, labels))
        if child is None:
            family = self._families[name]
            child = self._children[name, labels] = family.labels(*labels) if labels else family
        return child


def _register(metric: Metric) -> Any:
    # Imported here: the library reads PROMETHEUS_MULTIPROC_DIR at import, and the launcher sets it late.
    from prometheus_client import Counter, Gauge

    names = list(metric.labels)
    if metric.kind is Kind.COUNTER:
        return Counter(metric.exported_name, metric.help, names)
    if metric.kind is Kind.HISTOGRAM:
        from sglang_importance.metrics.weighted_histogram import WeightedHistogram

        return WeightedHistogram(metric.exported_name, metric.help, names, buckets=metric.bounds)
    # Sizes and uses of several schedulers add up; those of a process that has ended must not.
    return Gauge(metric.exported_name, metric.help, names, multiprocess_mode="livesum")

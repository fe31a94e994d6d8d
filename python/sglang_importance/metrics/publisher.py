"""The scheduler's part of ``sgl_importance.metrics_table``, on the server's own ``/metrics``.

Counts are kept in plain integers on the hot path and published once per request, as increments: a
scheduler process shares its registry with the HTTP process through ``PROMETHEUS_MULTIPROC_DIR``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl_importance.metrics_table import Kind, Process, of_process
from sgl_importance.nodes.ages import Histogram
from sgl_importance.reuse.calibration import BUCKETS
from sglang_importance.metrics.exposition import Exposition, metrics_are_shared
from sglang_importance.metrics.scheduler_counters import Counters

MISSED = "missed_tokens_total"

FIELDS = {
    metric.name: metric.name.removesuffix("_total")
    for metric in of_process(Process.SCHEDULER)
    if metric.kind is Kind.COUNTER
}
"""Where ``Counters`` keeps a series: once for all, not for each request."""


def counter_values(counters: Counters) -> dict[str, Mapping[Any, float]]:
    """The value of every counter of the scheduler so far: by name, then by label value or values."""
    calibration, pages = counters.calibration, counters.page_traffic
    values: dict[str, Mapping[Any, float]] = {
        "emissions_total": {(): counters.emission_time.passes},
        "emission_seconds_total": {(): counters.emission_time.seconds},
        "pages_read_total": {(): pages.read},
        "pages_loaded_total": {(): pages.loaded},
        "pages_written_total": {(): pages.written},
        "pages_candidates_total": {(): pages.candidates},
        "pages_selected_total": {(): pages.selected},
        "pages_loaded_bytes_total": {(): pages.loaded_bytes},
        "pages_load_seconds_total": {(): pages.load_seconds},
        "reuse_predictions_total": dict(zip(BUCKETS, calibration.judged, strict=True)),
        "reuse_predicted_total": dict(zip(BUCKETS, calibration.predicted, strict=True)),
        "reuse_observed_total": dict(zip(BUCKETS, calibration.observed, strict=True)),
    }
    for name, field in FIELDS.items():
        if name not in values:
            count = getattr(counters, field)
            values[name] = count if isinstance(count, dict) else {(): count}
    return values


def histograms(counters: Counters) -> dict[str, Mapping[Any, Histogram]]:
    """Every histogram of the scheduler: by name, then by label value."""
    ages = counters.ages
    return {
        "return_age_seconds": ages.returned,
        "eviction_age_seconds": ages.evicted,
        "eviction_reuses": ages.reuses,
    }


class MetricsPublisher:
    """Adds what happened since the last call to the server's Prometheus series."""

    def __init__(self) -> None:
        self._exposition = Exposition(of_process(Process.SCHEDULER))
        self._published: dict[str, dict[Any, float]] = {}
        self._published_weights: dict[tuple[str, Any], tuple[list[int], float]] = {}

    @classmethod
    def create(cls, *, enabled: bool) -> MetricsPublisher | None:
        """A publisher where the server exports metrics, else None."""
        if not enabled or not metrics_are_shared():
            return None
        return cls()

    def publish(self, counters: Counters, gauges: Mapping[str, Mapping[Any, float]]) -> None:
        """
        Args:
            counters: what has happened since the start.
            gauges: what is so now, by name, then by label value.
        """
        for name, values in counter_values(counters).items():
            if name != MISSED:
                self._publish_counter(name, values)
        self._publish_histograms(counters)
        for name, values in gauges.items():
            if self._published.get(name) != values:
                for labels, value in values.items():
                    self._exposition.set(name, label_values(labels), value)
                self._published[name] = dict(values)

    def publish_misses(self, counters: Counters) -> None:
        """As ``publish``, of what is counted on a thread of its own; one call at a time."""
        self._publish_counter(MISSED, counters.missed_tokens)

    def _publish_counter(self, name: str, values: Mapping[Any, float]) -> None:
        before = self._published.get(name)
        if before == values:  # compared as a whole: most families stand still during a request
            return
        now = dict(values)
        for labels, value in now.items():
            increment = value - before[labels] if before is not None else value
            if increment:
                self._exposition.increase(name, label_values(labels), increment)
        self._published[name] = now

    def _publish_histograms(self, counters: Counters) -> None:
        for name, by_label in histograms(counters).items():
            for labels, histogram in by_label.items():
                weights, total = self._published_weights.get((name, labels), (None, 0.0))
                if weights == histogram.weights:
                    continue
                grown = histogram.weights
                if weights is not None:
                    grown = [now - before for now, before in zip(grown, weights, strict=True)]
                self._exposition.add_weights(name, label_values(labels), grown, histogram.total - total)
                self._published_weights[name, labels] = (list(histogram.weights), histogram.total)


def label_values(labels: str | tuple[str, ...]) -> tuple[str, ...]:
    """Label values as a tuple, whatever they key."""
    return labels if isinstance(labels, tuple) else (labels,)

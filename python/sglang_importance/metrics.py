"""Prometheus series on the server's own ``/metrics``: the scheduler's part of ``sgl_importance.metrics``.

Counts are kept in plain integers on the hot path and published once per request, as increments: a
scheduler process shares its registry with the HTTP process through ``PROMETHEUS_MULTIPROC_DIR``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sgl_importance.calibration import BUCKETS
from sgl_importance.cost import Tier
from sgl_importance.metrics import Process, of_process
from sglang_importance.attention.emission_time import EMISSION_TIME
from sglang_importance.exposition import Exposition, Series, metrics_are_shared
from sglang_importance.gauges import gauge_values
from sglang_importance.storage.metrics import StorePublisher

if TYPE_CHECKING:
    from sglang_importance.component import ImportanceComponent
    from sglang_importance.counters import Counters


def current_values(counters: Counters) -> dict[Series, float]:
    """The value of every counter of the scheduler, as counted so far."""
    values: dict[Series, float] = {
        ("requests_total", ()): counters.admitted_requests,
        ("prompt_tokens_total", ()): counters.prompt_tokens,
        ("prewarmed_hit_tokens_total", ()): counters.prewarmed_hit_tokens,
        ("loaded_back_nodes_total", ()): counters.loaded_back_nodes,
        ("loaded_back_tokens_total", ()): counters.loaded_back_tokens,
        ("evicted_body_mass_total", ()): counters.evicted_body_mass,
        ("folds_total", ()): counters.folds,
        ("fold_seconds_total", ()): counters.fold_seconds,
        ("emissions_total", ()): EMISSION_TIME.passes,
        ("emission_seconds_total", ()): EMISSION_TIME.seconds,
        ("observed_saved_tokens_total", ()): counters.observed_saved_tokens,
        ("observed_lost_tokens_total", ()): counters.observed_lost_tokens,
        ("observed_agreed_tokens_total", ()): counters.observed_agreed_tokens,
        ("shadow_prompt_tokens_total", ()): counters.shadow_prompt_tokens,
    }
    by_one_label: dict[str, Mapping[Any, float]] = {
        "hit_requests_total": counters.hit_requests,
        "hit_tokens_total": counters.hit_tokens,
        "demoted_tokens_total": counters.demoted_tokens,
        "offered_tokens_total": counters.offered_tokens,
        "written_tokens_total": counters.written_tokens,
        "operations_total": counters.operations,
        "operation_seconds_total": counters.operation_seconds,
        "shadow_hit_tokens_total": counters.shadow_hit_tokens,
        "reuse_predictions_total": dict(zip(BUCKETS, counters.calibration.judged, strict=True)),
        "reuse_predicted_total": dict(zip(BUCKETS, counters.calibration.predicted, strict=True)),
        "reuse_observed_total": dict(zip(BUCKETS, counters.calibration.observed, strict=True)),
    }
    for name, by_label in by_one_label.items():
        for label, value in by_label.items():
            values[name, (label,)] = value
    by_tier_and_reason: dict[str, Mapping[tuple[Tier, Any], int]] = {
        "evicted_nodes_total": counters.evicted_nodes,
        "evicted_tokens_total": counters.evicted_tokens,
        "dropped_tokens_total": counters.dropped_tokens,
        "refused_tokens_total": counters.refused_tokens,
    }
    for name, by_reason in by_tier_and_reason.items():
        for labels, value in by_reason.items():
            values[name, labels] = value
    return values


class MetricsPublisher:
    """Adds what happened since the last call to the server's Prometheus series."""

    def __init__(self) -> None:
        self._exposition = Exposition(of_process(Process.SCHEDULER))
        self._published: dict[Series, float] = {}

    @classmethod
    def create(cls, *, enabled: bool) -> MetricsPublisher | None:
        """A publisher where the server exports metrics, else None."""
        if not enabled or not metrics_are_shared():
            return None
        # A server without a store shows that nothing is stored.
        StorePublisher.create(enabled=True)
        return cls()

    def publish(self, component: ImportanceComponent) -> None:
        published = self._published
        for series, value in current_values(component.counters).items():
            increment = value - published.get(series, 0)
            if increment:
                self._exposition.increase(*series, increment)
                published[series] = value
        for series, value in gauge_values(component).items():
            if published.get(series) != value:
                self._exposition.set(*series, value)
                published[series] = value

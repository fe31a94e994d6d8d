"""Prometheus series on the server's own ``/metrics``.

Counts are kept in plain integers on the hot path and published once per request, as increments: a
scheduler process shares its registry with the HTTP process through ``PROMETHEUS_MULTIPROC_DIR``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sgl_importance.cost import Tier

if TYPE_CHECKING:
    from sglang_importance.counters import Counters

PREFIX = "sglang:kv_importance_"

# name -> (help, label)
SERIES: dict[str, tuple[str, str | None]] = {
    "requests_total": ("Admitted requests, each counted once", None),
    "hit_tokens_total": ("Prompt tokens found in the cache, by the tier that held them", "tier"),
    "evicted_nodes_total": ("Radix tree nodes evicted, by the tier that they left", "tier"),
    "evicted_tokens_total": ("Tokens evicted, by the tier that they left", "tier"),
    "offered_tokens_total": ("Tokens whose copy was offered to the gate, by the tier below", "tier"),
    "refused_tokens_total": ("Tokens whose copy the gate refused, by the tier below", "tier"),
    "written_tokens_total": ("Tokens copied into a tier from above", "tier"),
    "folds_total": ("Observations of attention folded into the tree", None),
    "fold_seconds_total": ("Scheduler time spent folding, in seconds", None),
    "observed_saved_tokens_total": ("observe: recomputed tokens that importance would have kept", None),
    "observed_lost_tokens_total": ("observe: hit tokens that importance would have evicted", None),
    "observed_agreed_tokens_total": ("observe: evicted tokens that importance would have evicted too", None),
    "shadow_prompt_tokens_total": ("observe: prompt tokens that the shadow caches were asked for", None),
    "shadow_hit_tokens_total": ("observe: prompt tokens that a policy alone would have found", "policy"),
}


def current_values(counters: Counters) -> dict[tuple[str, str | None], float]:
    """The value of every series and label, as counted so far."""
    values: dict[tuple[str, str | None], float] = {
        ("requests_total", None): counters.admitted_requests,
        ("folds_total", None): counters.folds,
        ("fold_seconds_total", None): counters.fold_seconds,
        ("observed_saved_tokens_total", None): counters.observed_saved_tokens,
        ("observed_lost_tokens_total", None): counters.observed_lost_tokens,
        ("observed_agreed_tokens_total", None): counters.observed_agreed_tokens,
    }
    values["shadow_prompt_tokens_total", None] = counters.shadow_prompt_tokens
    for policy, tokens in counters.shadow_hit_tokens.items():
        values["shadow_hit_tokens_total", policy] = tokens
    for tier in Tier:
        values["hit_tokens_total", tier.value] = counters.hit_tokens[tier]
        if tier is not Tier.STORAGE:
            values["evicted_nodes_total", tier.value] = counters.evicted_nodes[tier]
            values["evicted_tokens_total", tier.value] = counters.evicted_tokens[tier]
        if tier is not Tier.DEVICE:
            values["offered_tokens_total", tier.value] = counters.offered_tokens[tier]
            values["refused_tokens_total", tier.value] = counters.refused_tokens[tier]
            values["written_tokens_total", tier.value] = counters.written_tokens[tier]
    return values


class MetricsPublisher:
    """Adds what was counted since the last call to the server's Prometheus counters."""

    def __init__(self) -> None:
        # Imported here: the library reads PROMETHEUS_MULTIPROC_DIR at import, and the launcher sets it late.
        from prometheus_client import Counter

        self._series = {
            name: Counter(PREFIX + name, help_text, [label] if label else [])
            for name, (help_text, label) in SERIES.items()
        }
        self._published: dict[tuple[str, str | None], float] = {}

    @classmethod
    def create(cls, *, enabled: bool) -> MetricsPublisher | None:
        """A publisher where the server exports metrics, else None."""
        return cls() if enabled and "PROMETHEUS_MULTIPROC_DIR" in os.environ else None

    def publish(self, counters: Counters) -> None:
        for (name, label), value in current_values(counters).items():
            increment = value - self._published.get((name, label), 0)
            series = self._series[name] if label is None else self._series[name].labels(label)
            if increment or (name, label) not in self._published:
                series.inc(increment)  # zeros too, once, so that a series exists before its first event
                self._published[name, label] = value

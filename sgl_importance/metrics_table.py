"""Every series that a server exports: the one table that publishers, documents and tests read.

Names follow Prometheus and sglang: ``sglang:`` ahead, units in the name, ``_total`` on what only grows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product

from sgl_importance.misses.reason import Reason
from sgl_importance.nodes.ages import AGE_BOUNDS, EVICTING, PLACES, REUSE_BOUNDS, UPPER_AGES
from sgl_importance.nodes.ghosts import EvictionReason
from sgl_importance.placement.hints.shared_actions import SHARED_ACTIONS
from sgl_importance.reuse.calibration import BUCKETS, HORIZON
from sgl_importance.storage.store_counters import LABEL_VALUES, SERIES
from sgl_importance.storage.tier_chain.tier_counters import TIER_SERIES
from sgl_importance.tiers import Tier

PREFIX = "sglang:kv_importance_"
STORE = "store_"
TIER = "store_tier_"

OPERATIONS = (
    *("importance", "pin", "pins", "unpin", "prewarm_facts", "prewarm_room"),
    *("snapshot", "tree", "node", "node_prompt", "find", "events", "why", "why_prompt", "answered"),
    "close_session",
)
"""Operations that the HTTP process asks a scheduler for."""
SOURCES = (*(tier.value for tier in Tier), "computed")
"""Sources of a pre-warm's tokens."""
PREWARM_ENDS = ("done", "cancelled", "failed")
HINT_OUTCOMES = ("followed", "ignored")
SHADOWS = ("lru", "importance")


class FaultPlace(StrEnum):
    """Place in a scheduler where an exception of ours was caught."""

    ADMISSION = "admission"
    """Taking in that a request was admitted, or is about to enter the tree."""
    TREE_EVENT = "tree_event"
    """Following a node: made, cut, moved, removed."""
    RANKING = "ranking"
    """Choosing what to evict, or what to copy down."""
    LEARNING = "learning"
    """Taking in what a request said, page scores included."""
    RECORDING = "recording"
    OBSERVATION = "observation"
    """The shadow caches of ``observe``, and the search for volatile beginnings."""
    REPORT = "report"
    MISSES = "misses"
    """The account of what was not found, which ends with it."""
    OPERATION = "operation"
    """An answer to the HTTP process."""
    METRICS = "metrics"


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Process(StrEnum):
    """Process that publishes a series."""

    SCHEDULER = "scheduler"
    HTTP = "http"
    STORE = "store"
    """A scheduler too, from any of its threads and under any policy."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of series.

    Attributes:
        name: without ``PREFIX``.
        help: one line, as Prometheus shows it.
        labels: values of each label; empty where only the code that counts knows them all.
        bounds: of a histogram's buckets.
    """

    name: str
    help: str
    kind: Kind = Kind.COUNTER
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    process: Process = Process.SCHEDULER
    bounds: tuple[float, ...] = ()

    @property
    def exported_name(self) -> str:
        return PREFIX + self.name

    @property
    def series(self) -> tuple[str, ...]:
        """Names under which its values are exported."""
        endings = ("_bucket", "_sum", "_count") if self.kind is Kind.HISTOGRAM else ("",)
        return tuple(self.exported_name + ending for ending in endings)

    def children(self) -> Iterator[tuple[str, ...]]:
        """Label values of every series that is known ahead; one empty tuple where there are no labels."""
        return product(*self.labels.values())


_TIERS = tuple(tier.value for tier in Tier)
_EVICTING = (Tier.DEVICE.value, Tier.HOST.value)
_BELOW = (Tier.HOST.value, Tier.STORAGE.value)
_BY_TIER = {"tier": _TIERS}
_EVICTED = {"tier": _EVICTING, "reason": tuple(reason.value for reason in EvictionReason)}
_BUCKETS = {"bucket": BUCKETS}

_SCHEDULER = (
    # ---- hits ----
    Metric("requests_total", "Admitted requests, each counted once"),
    Metric("prompt_tokens_total", "Prompt tokens of admitted requests"),
    Metric("hit_requests_total", "Admitted requests that found something there, by tier", labels=_BY_TIER),
    Metric(
        "hit_tokens_total", "Prompt tokens found in the cache, by the tier that held them", labels=_BY_TIER
    ),
    Metric(
        "missed_tokens_total",
        "Prompt tokens that were computed, by the reason why they were not found",
        labels={"reason": tuple(reason.value for reason in Reason)},
    ),
    Metric("prewarmed_hit_tokens_total", "Tokens that a pre-warm brought in, at their first hit"),
    Metric(
        "volatile_lost_tokens_total",
        "Tokens computed again behind text that changes with each request, at the beginning of its prompt",
    ),
    # ---- moves ----
    Metric("evicted_nodes_total", "Nodes evicted, by the tier that they left and why", labels=_EVICTED),
    Metric("evicted_tokens_total", "Tokens evicted, by the tier that they left and why", labels=_EVICTED),
    Metric("demoted_tokens_total", "Evicted tokens that a lower tier holds", labels={"tier": _EVICTING}),
    Metric("dropped_tokens_total", "Evicted tokens that no lower tier holds", labels=_EVICTED),
    Metric(
        "loaded_back_nodes_total",
        "Nodes copied back to the device, from the host or, without a host tier, from storage",
    ),
    Metric(
        "loaded_back_tokens_total",
        "Tokens copied back to the device, from the host or, without a host tier, from storage",
    ),
    Metric("written_tokens_total", "Tokens copied into a tier from above", labels={"tier": _BELOW}),
    # ---- ages: each token counts ----
    Metric(
        "return_age_seconds",
        "Age in seconds of tokens that were asked for again, by the tier that held them",
        Kind.HISTOGRAM,
        {"place": PLACES},
        bounds=AGE_BOUNDS,
    ),
    Metric(
        "eviction_age_seconds",
        "Time since the last request for tokens that a tier evicted, in seconds",
        Kind.HISTOGRAM,
        {"tier": tuple(tier.value for tier in EVICTING)},
        bounds=AGE_BOUNDS,
    ),
    Metric(
        "eviction_reuses",
        "How often requests had found the tokens that a tier evicted",
        Kind.HISTOGRAM,
        {"tier": tuple(tier.value for tier in EVICTING)},
        bounds=REUSE_BOUNDS,
    ),
    Metric(
        "resident_tokens_by_idle_seconds",
        "Tokens that a tier holds, by the seconds since their last request, when all were looked at last",
        Kind.GAUGE,
        {"tier": _TIERS, "le": UPPER_AGES},
    ),
    # ---- tiered pages: each layer counts its own ----
    Metric("pages_read_total", "Pages of tiered KV that attention asked for, in each layer"),
    Metric("pages_loaded_total", "Of these, those that came from the host"),
    Metric("pages_written_total", "Pages of tiered KV that went to the host, in each layer"),
    Metric("pages_candidates_total", "Pages that a selector chose from, in each layer"),
    Metric("pages_selected_total", "Of these, those that it chose for a step to read"),
    Metric("pages_loaded_bytes_total", "Bytes of tiered KV that came from the host"),
    Metric("pages_load_seconds_total", "Time that attention waited for copies from the host, in seconds"),
    # ---- memory ----
    Metric("size_tokens", "Tokens that a tier can hold", Kind.GAUGE, {"tier": _EVICTING}),
    Metric("used_tokens", "Tokens of a tier that are taken", Kind.GAUGE, {"tier": _EVICTING}),
    Metric("pages_resident", "Pages of tiered KV in slots on the device, summed over layers", Kind.GAUGE),
    Metric("nodes", "Nodes with observed attention on the device", Kind.GAUGE),
    Metric("body_mass", "Mean body mass of the nodes on the device, summed over pages", Kind.GAUGE),
    Metric("evicted_body_mass_total", "Mean body mass of the nodes that the device evicted"),
    # ---- pins ----
    Metric("pins", "Pins that have not ended", Kind.GAUGE),
    Metric("pinned_tokens", "Tokens that pins hold of their budget", Kind.GAUGE, {"tier": _EVICTING}),
    Metric("pin_budget_tokens", "Tokens that pins may hold", Kind.GAUGE, {"tier": _EVICTING}),
    # ---- what clients say ----
    Metric("sessions_closed_total", "Sessions that said that they were over"),
    Metric(
        "sessions_given_back_tokens_total", "Tokens on the device or the host that only these had asked for"
    ),
    Metric(
        "hint_actions_total",
        "Actions of kv_hints envelopes that are not ours, by what became of them",
        labels={"action": SHARED_ACTIONS, "outcome": HINT_OUTCOMES},
    ),
    # ---- time ----
    Metric("folds_total", "Observations of attention folded into the tree"),
    Metric(
        "fold_seconds_total",
        "Scheduler time spent folding, page scores that wait for it included, in seconds",
    ),
    Metric("emissions_total", "Forward passes that observed attention"),
    Metric(
        "emission_seconds_total",
        "Host time spent on page scores, in forward passes and after them, in seconds",
    ),
    Metric("operations_total", "Answers to the HTTP process", labels={"operation": OPERATIONS}),
    Metric(
        "operation_seconds_total",
        "Scheduler time spent on such answers, in seconds",
        labels={"operation": OPERATIONS},
    ),
    # ---- faults ----
    Metric("ledger_lost_visits_total", "Finished requests that could not be written into the ledger"),
    Metric(
        "faults_total",
        "Exceptions of ours in a scheduler, which went on serving",
        labels={"place": tuple(place.value for place in FaultPlace)},
    ),
    Metric("fallback", "Whether a fault has ended learning: 1 where the server evicts by LRU", Kind.GAUGE),
    # ---- prediction ----
    Metric(
        "reuse_predictions_total",
        f"Sampled visits whose next {HORIZON} requests are over, by predicted P(reuse), upper bound",
        labels=_BUCKETS,
    ),
    Metric("reuse_predicted_total", "Sum of the predicted P(reuse) of these visits", labels=_BUCKETS),
    Metric("reuse_observed_total", "Of these visits, those that were followed by another", labels=_BUCKETS),
    # ---- observe ----
    Metric("shadow_prompt_tokens_total", "observe: prompt tokens that the shadow caches were asked for"),
    Metric(
        "shadow_hit_tokens_total",
        "observe: prompt tokens that a policy alone would have found",
        labels={"policy": SHADOWS},
    ),
)

_HTTP = tuple(
    Metric(name, text, labels=labels, process=Process.HTTP)
    for name, text, labels in (
        ("prewarm_started_total", "Pre-warms begun", {}),
        ("prewarm_ended_total", "Pre-warms over, by how they ended", {"state": PREWARM_ENDS}),
        ("prewarm_planned_tokens_total", "Tokens that pre-warms set out to bring in", {}),
        ("prewarm_done_tokens_total", "Of these, brought in or found, by their source", {"source": SOURCES}),
        ("prewarm_refused_tokens_total", "Of these, in prompts that the server refused", {}),
    )
)

_STORE = tuple(
    Metric(
        f"{STORE}{name}_total",
        text,
        labels={label: LABEL_VALUES.get(name, ())} if label else {},
        process=Process.STORE,
    )
    for name, (text, label) in SERIES.items()
)

_STORE_TIERS = tuple(
    # The names of tiers are in the operator's file.
    Metric(f"{TIER}{name}_total", text, labels={"tier": ()}, process=Process.STORE)
    for name, text in TIER_SERIES.items()
)

METRICS: tuple[Metric, ...] = (*_SCHEDULER, *_HTTP, *_STORE, *_STORE_TIERS)


def of_process(process: Process) -> tuple[Metric, ...]:
    """The metrics that a process publishes."""
    return tuple(metric for metric in METRICS if metric.process is process)

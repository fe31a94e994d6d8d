"""Counts of what happened, kept by the scheduler thread and read by metrics and snapshots."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

from sglang.srt.managers.schedule_batch import Req

from sgl_importance.metrics_table import HINT_OUTCOMES, OPERATIONS, SHADOWS, FaultPlace
from sgl_importance.misses.reason import Reason
from sgl_importance.nodes.ages import Ages
from sgl_importance.nodes.ghosts import EvictionReason
from sgl_importance.placement.hints.shared_actions import SHARED_ACTIONS
from sgl_importance.reuse.calibration import Calibration
from sgl_importance.tiers import Tier
from sgl_importance_kernels.sparse.traffic import PageTraffic
from sglang_importance.metrics.emission_time import EmissionTime
from sglang_importance.upstream.request_record import found_tokens


def _zero_by_tier() -> dict[Tier, int]:
    return dict.fromkeys(Tier, 0)


def _zero_by_eviction() -> dict[tuple[Tier, EvictionReason], int]:
    return {(tier, reason): 0 for tier in Tier for reason in EvictionReason}


def _zero_by_action() -> dict[tuple[str, str], int]:
    return dict.fromkeys(product(SHARED_ACTIONS, HINT_OUTCOMES), 0)


@dataclass(slots=True)
class Counters:
    """Monotone counts since the cache was built.

    A field has the name of its series in ``sgl_importance.metrics_table``, without ``_total``: what it counts
    stands there. One with labels is a dict by label value, or by the tuple of several.

    Attributes:
        ages: of what is asked for again, evicted and held, which is four families.
        calibration: predictions of reuse and what became of them, which is three series.
        page_traffic: the pool's own counts of tiered pages.
        emission_time: the score rows' own, which is two series.
    """

    requests: int = 0
    prompt_tokens: int = 0
    hit_requests: dict[Tier, int] = field(default_factory=_zero_by_tier)
    prewarmed_hit_tokens: int = 0
    hit_tokens: dict[Tier, int] = field(default_factory=_zero_by_tier)
    missed_tokens: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    evicted_nodes: dict[tuple[Tier, EvictionReason], int] = field(default_factory=_zero_by_eviction)
    evicted_tokens: dict[tuple[Tier, EvictionReason], int] = field(default_factory=_zero_by_eviction)
    demoted_tokens: dict[Tier, int] = field(default_factory=_zero_by_tier)
    dropped_tokens: dict[tuple[Tier, EvictionReason], int] = field(default_factory=_zero_by_eviction)
    evicted_body_mass: float = 0.0
    loaded_back_nodes: int = 0
    loaded_back_tokens: int = 0
    written_tokens: dict[Tier, int] = field(default_factory=_zero_by_tier)
    sessions_closed: int = 0
    sessions_given_back_tokens: int = 0
    hint_actions: dict[tuple[str, str], int] = field(default_factory=_zero_by_action)
    folds: int = 0
    fold_seconds: float = 0.0
    operations: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OPERATIONS, 0))
    operation_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(OPERATIONS, 0.0))
    ledger_lost_visits: int = 0
    faults: dict[FaultPlace, int] = field(default_factory=lambda: dict.fromkeys(FaultPlace, 0))
    ages: Ages = field(default_factory=Ages)
    calibration: Calibration = field(default_factory=Calibration)
    emission_time: EmissionTime = field(default_factory=EmissionTime)
    page_traffic: PageTraffic = field(default_factory=PageTraffic)
    volatile_lost_tokens: int = 0
    shadow_prompt_tokens: int = 0
    shadow_hit_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SHADOWS, 0))

    def admitted(self, req: Req) -> None:
        self.requests += 1
        self.prompt_tokens += len(req.origin_input_ids)
        for tier, tokens in found_tokens(req).items():
            self.hit_tokens[tier] += tokens
            self.hit_requests[tier] += tokens > 0

    def evicted(self, tier: Tier, tokens: int, reason: EvictionReason, *, below: Tier | None) -> None:
        """A node left the tier; ``below``: the tier that still holds it, None where its KV is lost."""
        self.evicted_nodes[tier, reason] += 1
        self.evicted_tokens[tier, reason] += tokens
        if below is None:
            self.dropped_tokens[tier, reason] += tokens
        else:
            self.demoted_tokens[tier] += tokens

    def evicted_from(self, tier: Tier) -> int:
        """Tokens evicted from the tier, whatever the reason."""
        return sum(tokens for (left, _), tokens in self.evicted_tokens.items() if left is tier)

    def loaded_back(self, tokens: int) -> None:
        self.loaded_back_nodes += 1
        self.loaded_back_tokens += tokens

    def answered(self, operation: str, seconds: float, *, is_over: bool) -> None:
        """A slice of an operation has run."""
        self.operations[operation] += is_over
        self.operation_seconds[operation] += seconds

"""Counts of what happened, kept by the scheduler thread and read by metrics and snapshots."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sgl_importance.cost import Tier

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def _zero_by_tier() -> dict[Tier, int]:
    return dict.fromkeys(Tier, 0)


@dataclass(slots=True)
class Counters:
    """Monotone counts since the cache was built.

    Attributes:
        admitted_requests: requests that entered the running batch, each counted once.
        hit_tokens: prompt tokens found in the cache, by the tier that held them.
        evicted_nodes: nodes evicted from each tier.
        evicted_tokens: tokens of those nodes.
        offered_tokens: tokens whose copy to a tier was offered to the gate, by tier.
        refused_tokens: those of them that the gate refused; offered again, they count again.
        written_tokens: tokens copied into a tier from above.
        folds: observations handed to the tree.
        fold_seconds: scheduler time spent on folds.
        observed_saved_tokens: ``observe``: tokens that importance would have kept and stock recomputed.
        observed_lost_tokens: ``observe``: tokens hit that importance would have evicted.
        observed_agreed_tokens: ``observe``: evicted tokens that both would have evicted.
        shadow_prompt_tokens: ``observe``: prompt tokens that the shadow caches were asked for.
        shadow_hit_tokens: ``observe``: found there, by policy.
    """

    admitted_requests: int = 0
    hit_tokens: dict[Tier, int] = field(default_factory=_zero_by_tier)
    evicted_nodes: dict[Tier, int] = field(default_factory=_zero_by_tier)
    evicted_tokens: dict[Tier, int] = field(default_factory=_zero_by_tier)
    offered_tokens: dict[Tier, int] = field(default_factory=_zero_by_tier)
    refused_tokens: dict[Tier, int] = field(default_factory=_zero_by_tier)
    written_tokens: dict[Tier, int] = field(default_factory=_zero_by_tier)
    folds: int = 0
    fold_seconds: float = 0.0
    observed_saved_tokens: int = 0
    observed_lost_tokens: int = 0
    observed_agreed_tokens: int = 0
    shadow_prompt_tokens: int = 0
    shadow_hit_tokens: dict[str, int] = field(default_factory=lambda: {"lru": 0, "importance": 0})

    def admitted(self, req: Req) -> None:
        self.admitted_requests += 1
        self.hit_tokens[Tier.DEVICE] += req.cached_tokens_device
        self.hit_tokens[Tier.HOST] += req.cached_tokens_host
        self.hit_tokens[Tier.STORAGE] += req.cached_tokens_storage

    def evicted(self, tier: Tier, tokens: int) -> None:
        if tokens == 0:
            return
        self.evicted_nodes[tier] += 1
        self.evicted_tokens[tier] += tokens

    def offered(self, tier: Tier, tokens: int, *, admitted: bool) -> None:
        self.offered_tokens[tier] += tokens
        if not admitted:
            self.refused_tokens[tier] += tokens

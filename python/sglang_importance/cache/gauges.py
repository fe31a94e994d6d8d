"""Gauges of the present contents of a scheduler's cache; no loop over nodes or pages."""

from __future__ import annotations

from typing import Any

from sglang_importance.cache.importance_cache import ImportanceRadixCache
from sglang_importance.cache.tiered_pool import tiered_pool
from sglang_importance.tree.occupancy import occupancy


def gauge_values(cache: ImportanceRadixCache) -> dict[str, dict[Any, float]]:
    """The value of every gauge of the scheduler: by name, then by label value."""
    component = cache.importance
    tiers, budgets = occupancy(cache), component.pins.budgets()
    pool = tiered_pool(cache)
    return {
        "size_tokens": {tier: each.total for tier, each in tiers.items()},
        "used_tokens": {tier: each.used for tier, each in tiers.items()},
        "pages_resident": {(): 0.0 if pool is None else float(pool.slots.resident_pages().sum())},
        "resident_tokens_by_idle_seconds": {**component.state.counters.ages.resident_tokens},
        "nodes": {(): len(component.body_mass)},
        "body_mass": {(): component.body_mass.total},
        "pins": {(): len(component.pins.table)},
        "pinned_tokens": {tier: granted for tier, (granted, _) in budgets.items()},
        "pin_budget_tokens": {tier: budget for tier, (_, budget) in budgets.items()},
        "fallback": {(): float(not component.state.faults.is_learning)},
    }

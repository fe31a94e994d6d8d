"""What a scheduler's cache holds right now, in O(1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sgl_importance.cost import Tier

if TYPE_CHECKING:
    from sglang_importance.radix_cache.ranked_component import RankedComponent


def gauge_values(component: RankedComponent) -> dict[str, dict[Any, float]]:
    """The value of every gauge of the scheduler: by name, then by label value."""
    occupancy, budgets = _occupancy(component), component.pins.budgets()
    return {
        "size_tokens": {tier: size for tier, (size, _) in occupancy.items()},
        "used_tokens": {tier: used for tier, (_, used) in occupancy.items()},
        "nodes": {(): len(component.body_mass)},
        "body_mass": {(): component.body_mass.total},
        "pins": {(): len(component.pins.table)},
        "pinned_tokens": {tier: granted for tier, (granted, _) in budgets.items()},
        "pin_budget_tokens": {tier: budget for tier, (_, budget) in budgets.items()},
    }


def _occupancy(component: RankedComponent) -> dict[Tier, tuple[int, int]]:
    """Tokens that each tier of ours can hold, and those that are taken."""
    cache = component.cache
    pools = {Tier.DEVICE: cache.token_to_kv_pool_allocator}
    if cache.cache_controller is not None:
        pools[Tier.HOST] = cache.cache_controller.mem_pool_host
    return {tier: (int(pool.size), int(pool.size - pool.available_size())) for tier, pool in pools.items()}

"""What a scheduler's cache holds right now, in O(1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_importance.cost import Tier

if TYPE_CHECKING:
    from sglang_importance.ranked_component import RankedComponent


def gauge_values(component: RankedComponent) -> dict[tuple[str, tuple[str, ...]], float]:
    """The value of every gauge of the scheduler, by name and label values."""
    values: dict[tuple[str, tuple[str, ...]], float] = {
        ("nodes", ()): len(component.body_mass),
        ("body_mass", ()): component.body_mass.total,
        ("pins", ()): len(component.pins.table),
    }
    for tier, (size, used) in _occupancy(component).items():
        label = (tier.value,)
        values["size_tokens", label] = size
        values["used_tokens", label] = used
    for tier, (granted, budget) in component.pins.budgets().items():
        label = (tier.value,)
        values["pinned_tokens", label] = granted
        values["pin_budget_tokens", label] = budget
    return values


def _occupancy(component: RankedComponent) -> dict[Tier, tuple[int, int]]:
    """Tokens that each tier of ours can hold, and those that are taken."""
    cache = component.cache
    pools = {Tier.DEVICE: cache.token_to_kv_pool_allocator}
    if cache.cache_controller is not None:
        pools[Tier.HOST] = cache.cache_controller.mem_pool_host
    return {tier: (int(pool.size), int(pool.size - pool.available_size())) for tier, pool in pools.items()}

"""The size of each tier of a cache and the part of it in use, in tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from sgl_importance.tiers import Tier

if TYPE_CHECKING:
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


class Occupancy(NamedTuple):
    """Tokens of one tier."""

    used: int
    total: int

    @property
    def free(self) -> int:
        return self.total - self.used


class _Pool(Protocol):
    """The sizes, in tokens, that sglang's device and host pools tell."""

    size: int

    def available_size(self) -> int: ...


def full_attention_allocator(allocator: BaseTokenToKVPoolAllocator) -> BaseTokenToKVPoolAllocator:
    """The one that a node's tokens are counted in, where sliding windows have a smaller pool of their own."""
    full: BaseTokenToKVPoolAllocator = getattr(allocator, "full_attn_allocator", allocator)
    return full


def occupancy(cache: UnifiedRadixCache) -> dict[Tier, Occupancy]:
    """The tiers that sglang sized, device first; storage knows no size."""
    pools: dict[Tier, _Pool] = {Tier.DEVICE: full_attention_allocator(cache.token_to_kv_pool_allocator)}
    if cache.cache_controller is not None:
        pools[Tier.HOST] = cache.cache_controller.mem_pool_host
    found = {}
    for tier, pool in pools.items():
        total = int(pool.size)
        found[tier] = Occupancy(total - int(pool.available_size()), total)
    return found


def capacity_tokens(cache: UnifiedRadixCache) -> dict[Tier, int]:
    """Size of the tiers that evict."""
    return {tier: each.total for tier, each in occupancy(cache).items()}

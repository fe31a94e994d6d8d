"""What tiered pages hold on the device, and what has moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_importance.pages.pool import TieredKVPool

if TYPE_CHECKING:
    from sglang_importance.radix_cache.importance_cache import ImportanceRadixCache


def tiered_pool(cache: ImportanceRadixCache) -> TieredKVPool | None:
    """The pool behind a cache, where its pages are tiered."""
    pool = cache.token_to_kv_pool_allocator.get_kvcache()
    return pool if isinstance(pool, TieredKVPool) else None


def describe_pages(pool: TieredKVPool) -> dict[str, Any]:
    """The part ``pages`` of ``GET /kv_importance``.

    Pages are counted in each layer: one that all layers load counts once for each.
    """
    plan, slots = pool.plan, pool.slots
    return {
        "layers": plan.shape.layers,
        "host_tokens": (plan.num_pages - 1) * plan.page_size,
        "device_tokens_per_layer": plan.slot_tokens,
        "device_bytes": plan.bytes_by_purpose,
        "device_budget_bytes": plan.budget_bytes,
        "max_requests": plan.num_frames,
        "open_pages": len(slots.open_pages.open()[0]),
        "resident_pages": slots.resident_pages().tolist(),
        "read": slots.traffic.read,
        "loaded": slots.traffic.loaded,
        "written": slots.traffic.written,
        "candidates": slots.traffic.candidates,
        "selected": slots.traffic.selected,
    }

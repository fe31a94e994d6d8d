"""What tiered pages hold on the device, and what has moved."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sgl_importance.signal.node_importance import FloatArray
from sglang_importance.cache.importance_cache import tiered_pool

if TYPE_CHECKING:  # the pool brings numba, which the HTTP process would load for nothing
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_importance.cache.importance_cache import ImportanceRadixCache
    from sglang_importance.sparse.pool import TieredKVPool


def describe_pages(pool: TieredKVPool) -> dict[str, Any]:
    """The part ``pages`` of ``GET /kv_importance``.

    Pages are counted in each layer: one that all layers load counts once for each.
    """
    plan, slots = pool.plan, pool.slots
    slots.settle()
    return {
        "layers": plan.shape.layers,
        "host_tokens": (plan.num_pages - 1) * plan.page_size,
        "device_tokens_per_layer": plan.slot_tokens,
        "device_bytes": plan.bytes_by_purpose,
        "device_budget_bytes": plan.budget_bytes,
        "max_requests": plan.num_frames,
        "open_pages": len(slots.open_pages.open()[0]),
        "resident_pages": slots.resident_pages().tolist(),
        **asdict(slots.traffic),
    }


@dataclass(frozen=True, slots=True)
class NodePages:
    """What the device knows of a node's pages, in order; float64 [pages] each.

    Attributes:
        resident: share of the layers that can read the page without the host.
        chosen: how often steps chose the page of late; mean over layers.
    """

    resident: FloatArray
    chosen: FloatArray


def node_pages(cache: ImportanceRadixCache, node: UnifiedTreeNode) -> NodePages | None:
    """The pages of a node in a tiered pool; None where the pool is another, or does not hold the node."""
    pool = tiered_pool(cache)
    locations = node.component(ComponentType.FULL).value
    if pool is None or locations is None:
        return None
    slots = pool.slots
    pages = locations[:: slots.page_size].long() // slots.page_size
    resident = torch.stack([slots.is_resident(layer, pages) for layer in range(pool.layer_num)])
    return NodePages(
        resident=resident.double().mean(dim=0).cpu().numpy(),
        chosen=slots.choices(pages).double().mean(dim=0).cpu().numpy(),
    )

"""A page of the tree, as JSON: what an operator sees of importance, reuse and loss."""

from __future__ import annotations

import base64
import binascii
import heapq
from typing import TYPE_CHECKING, Any

from sgl_importance.cost import Tier
from sgl_importance.importance import Origin
from sglang_importance.component import ImportanceComponent

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_importance.cache import ImportanceRadixCache

SCHEMA_VERSION = 1
DEFAULT_LIMIT = 100
MAX_LIMIT = 1000

_SortKey = tuple[float, int]


class InvalidCursor(ValueError):
    """The cursor did not come from this endpoint."""


def encode_cursor(key: _SortKey) -> str:
    """Opaque position behind the last node of a page."""
    return base64.urlsafe_b64encode(f"{key[0].hex()}:{key[1]}".encode()).decode()


def decode_cursor(cursor: str) -> _SortKey:
    """Raises InvalidCursor where the text was not made by ``encode_cursor``."""
    try:
        loss, node_id = base64.urlsafe_b64decode(cursor.encode()).decode().split(":")
        return float.fromhex(loss), int(node_id)
    except (ValueError, binascii.Error) as error:
        raise InvalidCursor("cursor must be a next_cursor of an earlier answer") from error


def snapshot(
    cache: ImportanceRadixCache, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None, min_tokens: int = 0
) -> dict[str, Any]:
    """Nodes by loss, largest first, and the tiers that hold them.

    Runs in the scheduler between two steps: one cheap pass over the tree ranks it, and only the nodes of
    the page are described in full. Losses move with the clock, so pages read at different clocks may
    repeat or miss a node; the answer carries its clock.

    Args:
        cache: the cache to describe.
        limit: nodes in this page, at most MAX_LIMIT.
        cursor: ``next_cursor`` of the page before; None for the first.
        min_tokens: leaves out nodes with fewer tokens.

    Raises:
        InvalidCursor: the cursor is not one of ours.
    """
    component = cache.importance
    after = decode_cursor(cursor) if cursor else None
    reuse = _reuse_probabilities(component)
    keys = {}
    for node, p_reuse in reuse.items():
        if len(node.key) < min_tokens:
            continue
        key = (_loss(component, node, p_reuse), node.id)
        if after is None or key < after:
            keys[key] = node
    page = heapq.nlargest(limit, keys)
    more = len(keys) > len(page)
    return {
        "version": SCHEMA_VERSION,
        "policy": component.options.policy,
        "page_size": component.page_size,
        "clock": component.policy.clock,
        "tiers": _tiers(cache, reuse),
        "nodes": [_describe(component, keys[key], loss=key[0], p_reuse=reuse[keys[key]]) for key in page],
        "next_cursor": encode_cursor(page[-1]) if page and more else None,
    }


def _reuse_probabilities(component: ImportanceComponent) -> dict[UnifiedTreeNode, float]:
    """P(reuse) of every node, at least that of its children: a child's reuse is its parent's."""
    policy = component.policy
    reuse = {node: policy.reuse_probability(component.metadata(node)) for node in component.nodes()}
    for node in reversed(reuse):  # children after parents
        if node.parent in reuse:
            reuse[node.parent] = max(reuse[node.parent], reuse[node])
    return reuse


def _loss(component: ImportanceComponent, node: UnifiedTreeNode, p_reuse: float) -> float:
    metadata = component.metadata(node)
    if node.evicted:
        tier, below = Tier.HOST, component.tier_below_host(metadata)
    else:
        tier, below = Tier.DEVICE, component.tier_below_device(node)
    return p_reuse * component.policy.value(tier, metadata, below=below)


def _describe(
    component: ImportanceComponent, node: UnifiedTreeNode, *, loss: float, p_reuse: float
) -> dict[str, Any]:
    metadata = component.metadata(node)
    importance = metadata.importance
    held = {Tier.DEVICE: not node.evicted, Tier.HOST: node.backuped, Tier.STORAGE: metadata.in_storage}
    assert node.parent is not None
    return {
        "id": node.id,
        "parent": node.parent.id if node.parent.parent is not None else None,
        "depth_tokens": metadata.depth,
        "tokens": metadata.tokens,
        "tiers": [tier.value for tier, holds in held.items() if holds],
        "body_mass": float(importance.body_mass().sum()),
        "peak": float(importance.peak().max()),
        "lift": importance.lift(),
        "self_mass": float(importance.body_mass(Origin.SELF).sum()),
        "cross_mass": float(importance.body_mass(Origin.CROSS).sum()),
        "queries": importance.queries,
        "accesses": metadata.accesses,
        "age": component.policy.clock - metadata.last_access,
        "p_reuse": p_reuse,
        "loss": loss,
        "pinned": False,
    }


def _tiers(cache: ImportanceRadixCache, nodes: dict[UnifiedTreeNode, float]) -> dict[str, Any]:
    """Occupancy in tokens. The size of the storage tier is not known to the server: total is null."""
    allocator = cache.token_to_kv_pool_allocator
    host = cache.cache_controller.mem_pool_host if cache.cache_controller is not None else None
    metadata = cache.importance.metadata
    return {
        Tier.DEVICE.value: {
            "used_tokens": allocator.size - allocator.available_size(),
            "total_tokens": allocator.size,
        },
        Tier.HOST.value: {
            "used_tokens": host.size - host.available_size() if host is not None else 0,
            "total_tokens": host.size if host is not None else 0,
        },
        Tier.STORAGE.value: {
            "used_tokens": sum(len(node.key) for node in nodes if metadata(node).in_storage),
            "total_tokens": None if cache.enable_storage else 0,
        },
    }

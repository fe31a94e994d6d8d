"""Spares the tiers below the device copies of what nobody will ask for again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from sglang.srt.mem_cache.unified_radix_cache import NodeId

    from sglang_importance.radix_cache.ranked_component import RankedComponent


class SparedCopies:
    """Refuses a backup of expendable nodes, whatever the write policy and the gate say.

    Two methods of the tree core are wrapped on the instance, which outlives a reset of the tree. What goes
    on behind an expendable node was asked for by a later request, which has made the node worth its copy.

    Args:
        component: its metadata and tree core.
    """

    def __init__(self, component: RankedComponent) -> None:
        self._component = component
        core = component.tree_core
        self._offers_backup: Callable[..., bool] = core._inc_hit_count_and_check
        self._evict_leaf: Callable[..., Any] = core.evict_device_leaf
        core._inc_hit_count_and_check = self._offer_backup
        core.evict_device_leaf = self._evict_device_leaf

    def _is_expendable(self, node: UnifiedTreeNode) -> bool:
        known = self._component.tree.known(node)
        return known is not None and known.expendable

    def _offer_backup(self, node: UnifiedTreeNode, chunked: bool = False) -> bool:
        return self._offers_backup(node, chunked) and not self._is_expendable(node)

    def _evict_device_leaf(self, node_id: NodeId, is_write_back: bool) -> Any:
        if is_write_back:
            node = self._component.tree_core.node_by_id(node_id)
            # Children that the host holds could not be reached without it.
            if not node.backuped and not node.children and self._is_expendable(node):
                is_write_back = False  # upstream then deletes the leaf, as under write-through
        return self._evict_leaf(node_id, is_write_back)

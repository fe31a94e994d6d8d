"""No copies to lower tiers of nodes that are to be dropped.

Upstream's write policy says when a copy is offered:

- ``write_through``: when a request's insert walks over a node that has no host copy;
- ``write_through_selective``: the same, from upstream's second count of the node on. Up to 0.5.21 that is at
  the end of the request that brought it, from 0.5.22 on with the second request that finds it;
- ``write_back``: when the device evicts the node, and a refused node is dropped; or when it gives up a state
  or a window of a node that stays, which go to the host with the node's KV or not at all.

Under ``importance`` all copies that are offered are made, but for those of expendable nodes. Storage copies
what the host has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, UnifiedTreeNode

from sgl_importance.metrics_table import FaultPlace
from sglang_importance.tree.state import TreeState
from sglang_importance.upstream.nodes import NodeId


class BackupFilter:
    """Asked ahead of every copy to the host.

    Two methods of the tree core are wrapped on the instance, which outlives a reset of the tree.

    Args:
        core: of the tree.
    """

    def __init__(self, state: TreeState, core: UnifiedTreeCore) -> None:
        self._state = state
        self._core = core
        self._counts_hit: Callable[..., bool] = core._inc_hit_count_and_check
        self._evict_leaf: Callable[..., Any] = core.evict_device_leaf
        core._inc_hit_count_and_check = self._offer_backup  # type: ignore[assignment,method-assign]  # on this instance
        core.evict_device_leaf = self._evict_device_leaf  # type: ignore[method-assign]  # on this instance

    def _offer_backup(
        self, node: UnifiedTreeNode, *chunked: bool
    ) -> bool:  # which later releases do not pass
        is_offered = self._counts_hit(node, *chunked)
        if not is_offered or self._core.enable_external_cache_linker:
            return is_offered  # with a linker to another cache, not to a tier of ours
        return self._state.faults.learn(FaultPlace.RANKING, self._copies_to_host, node) is not False

    def _copies_to_host(self, node: UnifiedTreeNode) -> bool:
        return not self._is_expendable(node)

    def _evict_device_leaf(self, node_id: NodeId, is_write_back: bool) -> Any:
        if is_write_back:
            node = self._core.node_by_id(node_id)
            if self._state.faults.learn(FaultPlace.RANKING, self._drops, node):
                is_write_back = False  # upstream then deletes the leaf, as under write-through
        return self._evict_leaf(node_id, is_write_back)

    def copies_with_state(self, node_id: NodeId) -> bool:
        """Whether a node whose state or window the device gives up is copied to the host before, under
        ``write_back``."""
        node = self._core.node_by_id(node_id)
        return self._state.faults.learn(FaultPlace.RANKING, self._copies_with_state, node) is not False

    def _copies_with_state(self, node: UnifiedTreeNode) -> bool:
        return node.backuped or self._copies_to_host(node)

    def _drops(self, node: UnifiedTreeNode) -> bool:
        """Whether a node that the device evicts is dropped without a copy on the host."""
        # Copies of its descendants in lower tiers could not be reached without it.
        return not node.backuped and not node.children and self._is_expendable(node)

    def _is_expendable(self, node: UnifiedTreeNode) -> bool:
        known = self._state.tree.known(node)
        return known is not None and known.expendable

"""An eviction walk that takes chosen nodes only, whatever others would lose."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sgl_importance.tiers import Tier
from sglang_importance.tree.eviction import MarginalLossOrder, RankedLeaves
from sglang_importance.tree.state import TreeState
from sglang_importance.upstream.nodes import NodeId


class ChosenOrder(MarginalLossOrder):
    """Takes the chosen nodes that are leaves, and no others; what running requests hold is no leaf.

    Args:
        chosen: nodes in the order in which they are to go, those behind before those in front.
    """

    def __init__(self, state: TreeState, leaves: RankedLeaves, chosen: Sequence[UnifiedTreeNode]) -> None:
        super().__init__(state, leaves)
        self._core = state.tree.core
        self._ranks = state.policy
        self._chosen = chosen
        self._tried: set[NodeId] = set()

    def device_victim(self) -> NodeId | None:
        for node in self._chosen:
            if node in self._core.evictable_device_leaves and node.id not in self._tried:
                self._tried.add(node.id)  # upstream may refuse it
                self._ranks.leave(Tier.DEVICE, node.id)
                self._taken.append(node)
                return node.id
        return None

    def host_victim(self) -> NodeId | None:
        for node in self._chosen:
            if node in self._core.evictable_host_leaves:
                self._ranks.leave(Tier.HOST, node.id)
                return node.id
        return None

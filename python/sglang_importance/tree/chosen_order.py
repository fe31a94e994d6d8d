"""An eviction walk that takes chosen nodes only, whatever others would lose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sgl_importance.tiers import Tier
from sglang_importance.tree.eviction import MarginalLossOrder, RankedLeaves
from sglang_importance.tree.state import TreeState
from sglang_importance.upstream.nodes import NodeId


class ChosenOrder(MarginalLossOrder):
    """Takes the chosen nodes that are leaves, and no others; what running requests hold is no leaf.

    Args:
        chosen: nodes in the order in which they are to go, those behind before those in front. So a node that
            a walk has passed becomes no leaf in that walk any more.
    """

    def __init__(self, state: TreeState, leaves: RankedLeaves, chosen: Sequence[UnifiedTreeNode]) -> None:
        super().__init__(state, leaves)
        self._core = state.tree.core
        self._ranks = state.policy
        self._chosen = chosen
        self._on_device, self._on_host = iter(chosen), iter(chosen)

    def begin(self) -> None:
        super().begin()
        self._on_device = iter(self._chosen)

    @contextmanager
    def deciding(self) -> Iterator[None]:
        self._on_host = iter(self._chosen)
        with super().deciding():
            yield

    def device_victim(self) -> NodeId | None:
        for node in self._on_device:
            if node in self._core.evictable_device_leaves:
                self._ranks.leave(Tier.DEVICE, node.id)
                self._taken.append(node)
                return node.id
        return None

    def host_victim(self) -> NodeId | None:
        for node in self._on_host:
            if node in self._core.evictable_host_leaves:
                self._ranks.leave(Tier.HOST, node.id)
                return node.id
        return None

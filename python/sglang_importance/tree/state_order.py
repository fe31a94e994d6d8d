"""The order in which states of linear attention are given up, where our policy decides."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sgl_importance.tiers import Tier
from sglang_importance.tree.model_states import has_copy, is_passed, own_tokens
from sglang_importance.tree.state import TreeState

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedLRUList, UnifiedTreeNode

_Item = tuple[float, int, int]  # loss, last access, number of the node


class StateOrder:
    """States of the device, least marginal loss first, in walks like upstream's.

    There is one state to hundreds or thousands of tokens, so each walk ranks all of them. Within a walk a
    loss only grows, as states around it go: what comes up is ranked again before it is taken.
    """

    def __init__(self, state: TreeState) -> None:
        self._state = state
        self._heap: list[_Item] = []
        self._lru: UnifiedLRUList | None = None

    def begin(self) -> None:
        """A walk begins."""
        self._lru = self._state.tree.core.lru_lists[ComponentType.MAMBA]
        self._heap = [self._item(node) for node in self._lru.cache.values() if _is_unlocked(node)]
        heapify(self._heap)

    def next(self) -> UnifiedTreeNode | None:
        """The node whose state goes next, each once in a walk; None where there is none."""
        assert self._lru is not None, "begin a walk first"
        while self._heap:
            item = heappop(self._heap)
            node = self._lru.cache.get(item[2])
            if node is None or not _is_unlocked(node):  # it went with a leaf
                continue
            now = self._item(node)
            if now > item:
                heappush(self._heap, now)
                continue
            return node
        return None

    def _item(self, node: UnifiedTreeNode) -> _Item:
        tree = self._state.tree
        metadata = tree.metadata(node)
        loss = self._state.policy.state_loss(
            metadata,
            own_tokens(tree, node),
            below=Tier.HOST if has_copy(node) else None,
            is_passed=is_passed(tree, node),
        )
        return loss, metadata.last_access, node.id


def _is_unlocked(node: UnifiedTreeNode) -> bool:
    return node.component_data[ComponentType.MAMBA].lock_ref == 0

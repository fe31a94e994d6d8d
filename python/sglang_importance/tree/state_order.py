"""The order in which states of linear attention are given up, where our policy decides."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sgl_importance.tiers import Tier
from sglang_importance.tree.model_states import has_copy, is_passed
from sglang_importance.tree.state import TreeState

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedLRUList, UnifiedTreeNode

STATES_PER_WALK = 64

_Item = tuple[float, int, int]  # loss, last access, number of the node


class StateOrder:
    """States of the device, least marginal loss first, in walks like upstream's.

    A ranking of all states serves a walk for each STATES_PER_WALK of them, so that a walk takes no longer
    where there are many. Meanwhile a loss mostly grows, as states around it go: what comes up is ranked again
    before it is taken. States that came since wait for the next ranking.
    """

    def __init__(self, state: TreeState) -> None:
        self._state = state
        self._heap: list[_Item] = []
        self._walks = 0  # that the ranking still serves
        self._may_rank = False

    @property
    def _lru(self) -> UnifiedLRUList:
        return self._state.tree.core.lru_lists[ComponentType.MAMBA]

    def begin(self) -> None:
        """A walk begins."""
        self._may_rank = True
        if not self._walks:
            self._rank()
        self._walks -= 1

    def next(self) -> UnifiedTreeNode | None:
        """The node whose state goes next; None where there is none."""
        while self._heap or self._may_rank:
            if not self._heap:
                self._rank()
                continue
            item = heappop(self._heap)
            node = self._lru.cache.get(item[2])
            if node is None or not _is_unlocked(node):  # it went with a leaf, or is in use
                continue
            now = self._item(node)
            if now > item:
                heappush(self._heap, now)
                continue
            return node
        return None

    def _rank(self) -> None:
        """Ranks all states, once in a walk at most: what could not be evicted is not taken for ever."""
        self._may_rank = False
        self._heap = [self._item(node) for node in self._lru.cache.values() if _is_unlocked(node)]
        self._walks = 1 + len(self._heap) // STATES_PER_WALK
        heapify(self._heap)

    def _item(self, node: UnifiedTreeNode) -> _Item:
        tree = self._state.tree
        metadata = tree.metadata(node)
        loss = self._state.policy.state_loss(
            metadata,
            below=Tier.HOST if has_copy(node) else None,
            is_passed=is_passed(tree, node),
        )
        return loss, metadata.last_access, node.id


def _is_unlocked(node: UnifiedTreeNode) -> bool:
    return node.component_data[ComponentType.MAMBA].lock_ref == 0

"""The order in which states of linear attention are given up, where our policy decides."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sgl_importance.tiers import Tier
from sglang_importance.tree.model_states import has_copy, is_passed
from sglang_importance.tree.state import TreeState

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedLRUList

STATES_PER_WALK = 64

_Item = tuple[float, int, int]  # loss, last access, number of the node


class StateOrder:
    """States of the device, least marginal loss first, in walks like upstream's.

    Each walk ranks STATES_PER_WALK of them anew, in turn: none takes longer where there are many. Between its
    turns a state's loss mostly grows, as states around it go and as time passes: what comes up is ranked
    again before it is taken. Where the losses of all have grown meanwhile, the least of STATES_PER_WALK that
    came up is taken. States that came since the round began wait for the next one.
    """

    def __init__(self, state: TreeState) -> None:
        self._state = state
        self._heap: list[_Item] = []  # what the last round ranked, and this one so far
        self._round: list[_Item] = []
        self._waiting: list[int] = []  # nodes that this round has not come to
        self._may_rank_all = False

    @property
    def _lru(self) -> UnifiedLRUList:
        return self._state.tree.core.lru_lists[ComponentType.MAMBA]

    def begin(self) -> None:
        """A walk begins."""
        self._may_rank_all = True
        self._rank(STATES_PER_WALK)

    def next(self) -> UnifiedTreeNode | None:
        """The node whose state goes next; None where there is none."""
        came_up: list[_Item] = []  # ranked again by this call
        while not self._is_settled(came_up):
            if self._heap:
                node = self._lru.cache.get(heappop(self._heap)[2])
                if node is not None and _is_unlocked(node):  # it did not go with a leaf, and is not in use
                    heappush(came_up, self._item(node))
            elif self._may_rank_all:
                # Once in a walk at most: what could not be evicted is not taken for ever.
                self._may_rank_all = False
                self._waiting, self._round = [], []
                self._rank(len(self._lru.cache))
            else:
                return None
        taken = heappop(came_up)
        for item in came_up:
            heappush(self._heap, item)
        return self._lru.cache[taken[2]]

    def _is_settled(self, came_up: list[_Item]) -> bool:
        """Whether the first of these, a heap, is to be taken."""
        if not came_up:
            return False
        return not self._heap or came_up[0] <= self._heap[0] or len(came_up) >= STATES_PER_WALK

    def _rank(self, count: int) -> None:
        """Ranks as many more; at the end of a round what only earlier rounds knew is forgotten."""
        if not self._waiting:
            self._waiting = list(self._lru.cache)
        for _ in range(min(count, len(self._waiting))):
            node = self._lru.cache.get(self._waiting.pop())
            if node is not None and _is_unlocked(node):
                item = self._item(node)
                self._round.append(item)
                heappush(self._heap, item)
        if not self._waiting:
            self._heap, self._round = self._round, []
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

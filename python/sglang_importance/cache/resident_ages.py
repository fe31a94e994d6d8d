"""Looks at the age of everything that a tree holds, a few nodes with each request."""

from __future__ import annotations

from collections.abc import Iterator

from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sgl_importance.nodes.ages import AGE_BOUNDS, Histogram
from sgl_importance.tiers import Tier
from sglang_importance.tree.state import TreeState

NODES_AT_A_TIME = 16


class ResidentAges:
    """Goes round the tree; ``Ages.resident`` is what a round has seen, until the next is complete."""

    def __init__(self, state: TreeState) -> None:
        self._state = state
        self._root: UnifiedTreeNode | None = None
        self._rest: Iterator[UnifiedTreeNode] = iter(())
        self._seen: dict[Tier, Histogram] = {}

    def go_on(self) -> None:
        """Looks at the next nodes."""
        tree = self._state.tree
        if self._root is not tree.core.root_node:  # the tree was emptied at once
            self._begin()
        for _ in range(NODES_AT_A_TIME):
            node = next(self._rest, None)
            if node is None:
                self._state.counters.ages.looked_at(self._seen)
                self._begin()
                return
            if node in tree and tree.known(node) is not None:
                self._look_at(node)

    def _begin(self) -> None:
        tree = self._state.tree
        self._root, self._rest = tree.core.root_node, tree.nodes()
        self._seen = {tier: Histogram(AGE_BOUNDS) for tier in Tier}

    def _look_at(self, node: UnifiedTreeNode) -> None:
        metadata = self._state.tree.metadata(node)
        held = {Tier.DEVICE: not node.evicted, Tier.HOST: node.backuped, Tier.STORAGE: metadata.in_storage}
        for tier, holds in held.items():
            if holds:
                self._state.counters.ages.lies(self._seen[tier], metadata.tokens, metadata.last_access)

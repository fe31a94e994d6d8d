"""Upstream's sets of evictable leaves, which report their changes.

Every change of a leaf (lock, unlock, insert, split, demote, load back, delete) passes through ``add`` and
``discard`` of these two sets, so an incremental eviction order needs no other hook. Equality and set
algebra stay those of ``set``: upstream's ``sanity_check`` compares them with plain sets.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

LeafEvent = Callable[[UnifiedTreeNode], None]


class WatchedLeaves(set[UnifiedTreeNode]):
    """A set of leaves that reports each one that enters, leaves, or is touched while inside."""

    def __init__(self, entered: LeafEvent, left: LeafEvent) -> None:
        super().__init__()
        self._entered = entered
        self._left = left

    def add(self, node: UnifiedTreeNode) -> None:
        super().add(node)
        self._entered(node)

    def discard(self, node: UnifiedTreeNode) -> None:  # type: ignore[override]  # it holds nothing else
        if node in self:
            super().discard(node)
            self._left(node)

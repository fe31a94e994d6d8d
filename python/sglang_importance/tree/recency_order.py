"""The order in which upstream evicts by recency, kept from one walk to the next.

Upstream's Python tree puts all evictable leaves into a heap anew for every walk, so that its time grows with
their number. A leaf's last access only moves forward, so one heap can be kept instead: a leaf that was used
since it was entered goes back to where it belongs when it comes up.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heappop, heappush

from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

_COMPACT_SLACK = 64


class RecencyOrder:
    """The evictable leaves of one tier, least recently used first, in walks like upstream's.

    A walk takes each leaf once, whether it can then be evicted or not, and no leaf that became one on the way
    but the parent of the last that it took: so do ``_evict_device_next_node`` and ``drive_host_eviction`` of
    upstream's ``FullComponent``.
    """

    def __init__(self) -> None:
        self.reset(())

    def reset(self, leaves: Collection[UnifiedTreeNode]) -> None:
        """Follows another set of leaves, which is empty.

        Args:
            leaves: upstream's, as it is at any moment.
        """
        assert not leaves, "follow an empty set"
        self._leaves = leaves
        self._heap: list[tuple[float, int, UnifiedTreeNode]] = []  # (last access when entered, id, leaf)
        self._entered: dict[int, float] = {}  # that time, by id; items of the heap that differ are stale
        self._is_walking = False
        self._last: UnifiedTreeNode | None = None
        self._unsettled: list[UnifiedTreeNode] = []  # taken by the walk, or no leaf all through it

    def add(self, node: UnifiedTreeNode) -> None:
        """The node became an evictable leaf."""
        if self._is_walking:
            self._unsettled.append(node)
        else:
            self._enter(node)

    def discard(self, node: UnifiedTreeNode) -> None:
        """The node is no evictable leaf any more."""
        if self._is_walking:  # a leaf that becomes one again on the way is still in upstream's heap
            self._unsettled.append(node)
        else:
            self._entered.pop(node.id, None)

    def begin(self) -> None:
        """A walk begins."""
        if self._is_walking:  # the one before ended in an exception
            self.end()
        self._is_walking = True

    def next(self) -> UnifiedTreeNode | None:
        """The next leaf of the walk; None where there is none."""
        assert self._is_walking, "begin a walk first"
        parent, self._last = self._last and self._last.parent, None
        if parent is not None and parent in self._leaves:
            self._enter(parent)
        while self._heap:
            entered_at, node_id, node = heappop(self._heap)
            if self._entered.get(node_id) != entered_at:
                continue
            del self._entered[node_id]
            if node not in self._leaves:
                continue
            if node.last_access_time > entered_at:
                self._enter(node)
                continue
            self._last = node
            self._unsettled.append(node)
            return node
        return None

    def end(self) -> None:
        """The walk is over."""
        self._is_walking = False
        self._last = None
        unsettled, self._unsettled = self._unsettled, []
        for node in unsettled:
            if node in self._leaves:
                self._enter(node)
            else:
                self._entered.pop(node.id, None)

    def _enter(self, node: UnifiedTreeNode) -> None:
        if node.id in self._entered:
            return
        self._entered[node.id] = node.last_access_time
        heappush(self._heap, (node.last_access_time, node.id, node))
        if len(self._heap) > 2 * len(self._entered) + _COMPACT_SLACK:
            # Locking and unlocking a leaf leaves one stale item each time.
            self._heap = list({item for item in self._heap if self._entered.get(item[1]) == item[0]})
            heapify(self._heap)

    def check_integrity(self) -> None:
        """Asserts that every leaf is entered, and no later than it was used last. Not within a walk."""
        assert not self._is_walking
        assert self._entered.keys() == {node.id for node in self._leaves}
        items = {(time, node_id) for time, node_id, _ in self._heap}
        for node in self._leaves:
            entered_at = self._entered[node.id]
            assert (entered_at, node.id) in items, node.id
            assert entered_at <= node.last_access_time, node.id

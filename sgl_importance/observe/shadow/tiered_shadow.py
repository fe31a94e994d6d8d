"""A shadow cache with a host tier, which copies, loads back and evicts as the server's tree does.

Copies take no time: what a server's copy locks until it is done is evictable here. Hints that keep nodes from
the host, states and windows are left out, and so is storage.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import takewhile

from sgl_importance.observe.shadow.shadow_cache import ShadowCache
from sgl_importance.observe.shadow.shadow_node import ShadowNode
from sgl_importance.observe.shadow.shadow_ranking import ShadowRanking
from sgl_importance.tiers import Tier

LEAST_LOADED_TOKENS = 10
"""Fewer are computed again, not loaded (``unified_radix_cache.py``, ``load_back_threshold``)."""


class HostWrites(StrEnum):
    """When the host gets its copies, as by sglang's ``--hicache-write-policy``."""

    WRITE_THROUGH = "write_through"
    """When a prompt, or an answer, has been computed."""
    WRITE_BACK = "write_back"
    """When the device gives a node up."""

    @classmethod
    def of(cls, flag: str | None) -> HostWrites:
        """By sglang's flag; its ``write_through_selective`` copies what a request computed, too, when the
        request ends."""
        return cls.WRITE_BACK if flag == cls.WRITE_BACK else cls.WRITE_THROUGH


class TieredShadowCache(ShadowCache):
    """Device and host.

    Args:
        capacity: pages of the device's pool.
        host_capacity: pages of the host's.
        writes: when the host gets its copies.

    Attributes:
        host_used: pages that the host has copies of.
        loaded: pages that were loaded from the host so far.
        written: pages that were copied to the host so far.
    """

    def __init__(
        self,
        capacity: int,
        host_capacity: int,
        page_size: int,
        ranking: ShadowRanking,
        writes: HostWrites,
        *,
        spare_pages: int = 0,
        chunk_tokens: int | None = None,
    ) -> None:
        assert host_capacity > 0
        super().__init__(capacity, page_size, ranking, spare_pages=spare_pages, chunk_tokens=chunk_tokens)
        self.host_capacity = host_capacity
        self.host_used = self.loaded = self.written = 0
        self._is_write_back = writes is HostWrites.WRITE_BACK
        # Under write-back, nodes that both tiers have: the host gives these up first, the oldest first. As
        # upstream's, it may name nodes that only one tier has by now.
        self._twofold: dict[int, ShadowNode] = {}
        self._loading: list[ShadowNode] = []

    # ---- which tier a node can be evicted from ----

    def _rank(self, node: ShadowNode) -> None:
        if node.locks:
            return
        if not node.on_device:
            if not node.children:
                self.ranking.enter(node, Tier.HOST)
        elif self._is_device_leaf(node):
            below = Tier.HOST if node.on_host or self._is_write_back else None
            self.ranking.enter(node, Tier.DEVICE, below)
        else:
            self.ranking.leave(node)

    def _withdraw(self, node: ShadowNode) -> None:
        self.ranking.leave(node)
        self.ranking.leave(node, Tier.HOST)

    @staticmethod
    def _is_device_leaf(node: ShadowNode) -> bool:
        return not node.locks and not any(child.on_device for child in node.children.values())

    # ---- onto the device ----

    def _hold(self, node: ShadowNode, matched: int) -> tuple[ShadowNode, int]:
        self._lock(node)
        below = list(takewhile(lambda each: not each.on_device, node.up()))
        pages = sum(len(each.pages) for each in below)
        if not pages:
            return node, matched
        is_worth_loading = pages * self._page_size >= LEAST_LOADED_TOKENS
        if is_worth_loading:
            self._make_room(pages)
        if not is_worth_loading or self.used + self._private + pages > self.capacity:
            above = below[-1].parent
            assert above is not None
            self._lock(above)
            self._unlock(node)
            return above, matched - pages
        for each in below:
            each.on_device = True
        self.used += pages
        self.loaded += pages
        self._loading = below
        return node, matched

    def _insert(self, pages: list[bytes], serial: int, *, is_chunk: bool = False) -> ShadowNode:
        node, matched = self._walk(pages)
        computed_again = []
        for each in node.path():
            if not each.on_device:
                self._compute_again(each)
                computed_again.append(each)
            self._offer_copy(each, is_chunk=is_chunk)
        if matched < len(pages):
            node = self._add_leaf(node, pages, matched, serial)
            self._offer_copy(node, is_chunk=is_chunk)
        for each in computed_again:
            self.ranking.computed_again(each, serial)
        loaded, self._loading = self._loading, []  # loads are over when the first chunk has been computed
        for each in loaded:
            self._note_twofold(each)
        return node

    def _compute_again(self, node: ShadowNode) -> None:
        """A request has computed what only the host has."""
        assert node.parent is not None
        self._withdraw(node)
        node.on_device = True
        self.used += len(node.pages)
        self._note_twofold(node)
        for each in (node, node.parent):
            if not each.is_root:
                self._rank(each)

    # ---- to the host ----

    def _split(self, node: ShadowNode, length: int) -> ShadowNode:
        upper = super()._split(node, length)
        self._note_twofold(upper)
        return upper

    def _note_twofold(self, node: ShadowNode) -> None:
        if not self._is_write_back:
            return
        if node.on_device and node.on_host:
            self._twofold.setdefault(node.id, node)
        else:
            self._twofold.pop(node.id, None)

    def _offer_copy(self, node: ShadowNode, *, is_chunk: bool) -> None:
        """An insertion walked over the node, or made it."""
        if is_chunk or self._is_write_back or node.on_host or not self.ranking.copies(node):
            return
        # Behind a node that the host lacks, a copy would not be found.
        missing = [each for each in node.path() if not each.on_host]
        for each in missing:
            if not self._copy(each):
                return

    def _copy(self, node: ShadowNode) -> bool:
        """Copies the node to the host; False where that has no room for it."""
        pages = len(node.pages)
        lacking = self.host_used + pages - self.host_capacity
        if lacking > 0 and self._evict_from_host(lacking) < lacking:
            return False
        node.on_host = True
        self.host_used += pages
        self.written += pages
        self._note_twofold(node)
        self._rank(node)
        return True

    # ---- away ----

    def _evict_leaf(self, leaf: ShadowNode) -> int:
        is_offered = self._is_write_back and not leaf.on_host
        if is_offered and (leaf.children or self.ranking.copies(leaf)) and not self._copy(leaf):
            return self._drop(leaf)
        if not leaf.on_host:
            return super()._evict_leaf(leaf)
        freed, parent = len(leaf.pages), leaf.parent
        assert parent is not None
        self._withdraw(leaf)
        leaf.on_device = False
        self.used -= freed
        self.evicted += freed
        self._rank(leaf)
        if not parent.is_root:
            self._rank(parent)
        return freed

    def _cut_tail(self, victim: ShadowNode, asked: int) -> None:
        # As the server's tree: the host may give up its copy of either part before the other's.
        if not (self._is_write_back and victim.on_device and victim.on_host):
            super()._cut_tail(victim, asked)

    def _drop(self, leaf: ShadowNode) -> int:
        """The host has no room: the leaf of the device goes, and what only the host has behind it."""
        behind = list(leaf.children.values())
        for node in behind:
            behind.extend(node.children.values())
        for node in reversed(behind):
            self._leave_host(node)
        self._withdraw(leaf)
        return super()._evict_leaf(leaf)

    def _evict_from_host(self, pages: int) -> int:
        """Frees as many pages of the host or more; returns how many."""
        freed = self._give_up_twofold(pages) if self._is_write_back else 0
        while freed < pages and (victim := self.ranking.victim(Tier.HOST)) is not None:
            self._cut_tail(victim, pages - freed)
            freed += len(victim.pages)
            self._leave_host(victim)
        return freed

    def _leave_host(self, leaf: ShadowNode) -> None:
        """A leaf that only the host has leaves the tree."""
        self._withdraw(leaf)
        self.host_used -= len(leaf.pages)
        self._remove(leaf)

    def _remove(self, leaf: ShadowNode) -> None:
        self._twofold.pop(leaf.id, None)
        super()._remove(leaf)

    def _give_up_twofold(self, pages: int) -> int:
        """Copies of what the device has, those of its leaves last: they are about to be wanted."""
        freed = 0
        gone: list[ShadowNode] = []
        for spares_leaves in (True, False):
            for node in self._twofold.values():
                if freed >= pages:
                    break
                if not (node.on_device and node.on_host):
                    gone.append(node)
                elif not (spares_leaves and self._is_device_leaf(node)) and node not in self._loading:
                    node.on_host = False
                    self.host_used -= len(node.pages)
                    freed += len(node.pages)
                    gone.append(node)
        for node in gone:
            self._twofold.pop(node.id, None)
        return freed

    def check_integrity(self) -> None:
        super().check_integrity()
        nodes = list(self.nodes())
        assert self.host_used == sum(len(node.pages) for node in nodes if node.on_host)
        assert self.host_used <= self.host_capacity
        assert all(node.on_device or node.on_host for node in nodes)
        assert all(node.on_device for each in nodes if each.on_device for node in each.path())

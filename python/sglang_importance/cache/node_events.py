"""Applies upstream's changes of nodes to our facts, books and logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sglang.srt.mem_cache.unified_cache.components import CacheTransferPhase
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sgl_importance.metrics_table import FaultPlace
from sgl_importance.nodes.ghosts import Eviction, EvictionReason
from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.observe.trace.records import EventKind
from sgl_importance.tiers import Tier
from sglang_importance.cache.misses import Misses
from sglang_importance.observe.recorder import Recorder
from sglang_importance.placement.pinning import Pinning
from sglang_importance.placement.storage_writes import BufferedCopy, StorageWrite
from sglang_importance.tree.body_mass import BodyMassBook
from sglang_importance.tree.eviction import EvictionOrder, RankedLeaves, tier_below_host
from sglang_importance.tree.insertion import Insertion
from sglang_importance.tree.state import TreeState
from sglang_importance.upstream.nodes import key_of


class NodeEvents:
    """Handlers of all events of a node but visits by requests.

    Args:
        order: the eviction order, which gives the reason of an eviction.
        recorder: records each event; None records nothing.
        misses: remembers what was held; None where no account is kept.

    Attributes:
        on_cut: called with each node whose first tokens became a node of their own.
        split_reason: why nodes are cut at present.
    """

    def __init__(
        self,
        state: TreeState,
        leaves: RankedLeaves,
        order: EvictionOrder,
        body_mass: BodyMassBook,
        pins: Pinning,
        recorder: Recorder | None,
        misses: Misses | None = None,
    ) -> None:
        self.on_cut: list[Callable[[UnifiedTreeNode], None]] = []
        self.split_reason = "paths_part"
        self._state = state
        self._leaves = leaves
        self._order = order
        self._body_mass = body_mass
        self._pins = pins
        self._recorder = recorder
        self._misses = misses

    def record(
        self, kind: EventKind, tier: Tier, node: UnifiedTreeNode, reason: str, *, rid: str | None = None
    ) -> None:
        """Notes an event in the log of the last ones, and in the recording where there is one."""
        self._state.events.record(kind, tier, node, reason)
        self.record_only(kind, tier, node, rid=rid)

    def record_only(
        self, kind: EventKind, tier: Tier, node: UnifiedTreeNode, *, rid: str | None = None
    ) -> None:
        """Records an event that the log leaves out."""
        if self._recorder is not None:
            self._state.faults.beside(FaultPlace.RECORDING, self._write, kind, tier, node, rid)

    def _write(self, kind: EventKind, tier: Tier, node: UnifiedTreeNode, rid: str | None) -> None:
        assert self._recorder is not None
        tree = self._state.tree
        self._recorder.event(
            kind,
            tier,
            node,
            depth_tokens=tree.metadata(node).depth,
            page_size=tree.page_size,
            digest=tree.end_digest(node),
            clock=self._state.policy.clock,
            rid=rid,
        )

    def taken_in(self, node: UnifiedTreeNode, insertion: Insertion) -> NodeMetadata:
        """A node came into the tree."""
        metadata = self._state.tree.take_in(node, insertion)
        self._pins.taken_in(node, metadata)
        self._leaves.refresh(node)
        if self._misses is not None:
            self._misses.taken_in(node, insertion.rid)
        return metadata

    def prefetched(self, insertion: Insertion) -> None:
        """The storage tier brought its part of a request into host memory."""
        tree = self._state.tree
        for leaf in self._leaves.take_unknown_host_leaves():
            # Where windows have a pool of their own, one may have cut the leaf, and has entered it once more.
            for node in [part for part in tree.path(leaf) if tree.known(part) is None]:
                metadata = tree.take_in(node, insertion)
                self._pins.taken_in(node, metadata)
                metadata.in_storage = True
                self._state.events.prefetched(node)
                self._leaves.refresh(node)
                if self._misses is not None:
                    self._misses.taken_in(node, insertion.rid)

    def loaded_from_storage(self, node: UnifiedTreeNode) -> None:
        """Storage brought a node to the device at once, where there is no host tier."""
        self._state.tree.metadata(node).in_storage = True
        self._state.counters.loaded_back(len(key_of(node)))
        self.record(EventKind.LOAD_BACK, Tier.DEVICE, node, "prefetched")
        self._leaves.refresh(node)

    def split(self, new_parent: UnifiedTreeNode, child: UnifiedTreeNode) -> None:
        if self._state.tree.known(child) is None:
            return  # storage is bringing it: both parts are taken in with ``prefetched``
        self._state.tree.split(new_parent, child)
        if self._misses is not None:
            self._misses.split(new_parent, child)
        self._body_mass.remove(child)
        for part in (new_parent, child):
            self._body_mass.update(part)
        for told in self.on_cut:
            told(child)
        self.record(EventKind.SPLIT, Tier.DEVICE, new_parent, self.split_reason)

    def removed(self, node: UnifiedTreeNode) -> None:
        """The node leaves the tree; its parent is still linked."""
        self._leaves.left_tree(node)
        metadata = self._state.tree.metadata(node)
        if self._misses is not None:
            self._misses.removed(node, metadata)
        reason = self._order.reason(metadata)
        self.record(EventKind.REMOVE, Tier.DEVICE, node, reason)
        eviction = None
        if (tier := metadata.evicted_from) is not None:
            loss = self._state.policy.loss(tier, metadata, below=tier_below_host(metadata))
            eviction = Eviction(tier, self._state.policy.clock, loss, reason)
        self._state.tree.removed(node, eviction)

    def transferred(self, node: UnifiedTreeNode, phase: CacheTransferPhase, transfers: Sequence[Any]) -> None:
        self._leaves.refresh(node)  # a host copy makes the device copy cheap to restore
        if not transfers:
            return
        if phase is CacheTransferPhase.BACKUP_HOST:
            self._state.counters.written_tokens[Tier.HOST] += len(key_of(node))
            self.record(EventKind.BACK_UP, Tier.HOST, node, "write_policy")
        elif phase is CacheTransferPhase.LOAD_BACK and transfers[0].device_indices is not None:
            for node_id in transfers[0].nodes_to_load or ():
                loaded = self._state.tree.core.node_by_id(node_id)
                self._state.tree.metadata(loaded).off_device = False
                self._state.counters.loaded_back(len(key_of(loaded)))
                self._body_mass.update(loaded)
                self.record(EventKind.LOAD_BACK, Tier.DEVICE, loaded, "requested")

    def handed_to_storage(self, node: UnifiedTreeNode) -> None:
        """The node's pages are on their way into storage, and count as stored until the write has failed."""
        self._state.tree.metadata(node).in_storage = True
        self._leaves.refresh(node)

    def copy_handed_to_storage(self, copy: BufferedCopy) -> None:
        """The same of a copy of pages; its node is in the tree so far."""
        for part in self._last_parts(self._state.tree.core.node_by_id(copy.node_id), copy.tokens):
            self.handed_to_storage(part)

    def storage_ended(self, write: StorageWrite) -> None:
        """The write of a node has ended. It was locked on the host so long, or only its copy was kept."""
        path = self._state.tree.path_to(write.node_id)
        if write.is_stored:
            self._state.counters.written_tokens[Tier.STORAGE] += write.tokens
        if not path:
            return
        node = path[-1]
        if write.is_stored:
            self.record(EventKind.BACK_UP, Tier.STORAGE, node, "write_policy")
            return
        *_, first = self._last_parts(node, write.tokens)
        # What follows it may be there, and could not be found: a search ends with the first page that is not.
        missing = [first]
        while missing:
            node = missing.pop()
            self._state.tree.metadata(node).in_storage = False
            self._leaves.refresh(node)
            missing += (child for child in node.children.values() if self._is_in_storage(child))

    @staticmethod
    def _last_parts(node: UnifiedTreeNode, tokens: int) -> Iterator[UnifiedTreeNode]:
        """The nodes that hold the last tokens up to the node's end, the last first: it may have been cut."""
        while tokens > 0:
            yield node
            tokens -= len(key_of(node))
            assert node.parent is not None, "a node's front stays in front of it"
            node = node.parent

    def storage_emptied(self) -> None:
        """Storage was cleared or detached: what leaves the host is lost now, and may be written again."""
        for node in self._state.tree.nodes():
            if self._is_in_storage(node):
                self._state.tree.metadata(node).in_storage = False
                self._leaves.refresh(node)

    def _is_in_storage(self, node: UnifiedTreeNode) -> bool:
        known = self._state.tree.known(node)
        return known is not None and known.in_storage

    def evicted(self, node: UnifiedTreeNode, device_tokens: int, host_tokens: int) -> None:
        """The node gave up its copies on device and host, of so many tokens each."""
        metadata = self._state.tree.metadata(node)
        if device_tokens:
            metadata.off_device = True
            self._state.counters.evicted_body_mass += self._body_mass.remove(node)
        stored = tier_below_host(metadata)
        below = {Tier.DEVICE: Tier.HOST if node.backuped else stored, Tier.HOST: stored}
        for tier, tokens in ((Tier.DEVICE, device_tokens), (Tier.HOST, host_tokens)):
            if tokens and tier is Tier.HOST and not node.evicted:
                # Upstream takes copies of what the device has first, in its own order; no KV leaves.
                self.record(EventKind.EVICT, tier, node, EvictionReason.STOCK_ORDER)
            elif tokens:
                reason = self._order.reason(metadata)
                self._state.counters.evicted(tier, tokens, reason, below=below[tier])
                self._state.counters.ages.gave_up(tier, tokens, metadata.last_access, metadata.accesses)
                self.record(EventKind.EVICT, tier, node, reason)
                metadata.evicted_from = tier

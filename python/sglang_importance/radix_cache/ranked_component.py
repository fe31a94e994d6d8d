"""The tree component's lower half: metadata on nodes, and leaves that are evicted by marginal loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components import CacheTransferPhase, FullComponent

from sgl_importance.cost import Tier
from sgl_importance.ghost import Eviction, EvictionReason
from sgl_importance.node import NodeMetadata
from sgl_importance.options import ImportanceOptions
from sgl_importance.policy.importance import ImportancePolicy
from sgl_importance.trace.records import EventKind
from sglang_importance.metrics.scheduler_counters import Counters
from sglang_importance.observe.recorder import Recorder
from sglang_importance.placement.gating import Gating
from sglang_importance.placement.ledger_feed import LedgerFeed
from sglang_importance.placement.pinning import Pinning
from sglang_importance.tree.annotated_tree import AnnotatedTree
from sglang_importance.tree.body_mass import BodyMassBook
from sglang_importance.tree.event_log import EventLog
from sglang_importance.tree.leaf_sets import WatchedLeaves

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from sglang.srt.mem_cache.unified_radix_cache import NodeId, UnifiedRadixCache


class RankedComponent(FullComponent):
    """Upstream's full-attention component, with our metadata on its nodes and our order of its leaves.

    Args:
        options: what the operator chose.
        policy: ranks the leaves of both tiers.
        ghost_pages: pages to remember after their removal.
        recorder: what is told of tree events; None records nothing.
    """

    def __init__(
        self,
        cache: UnifiedRadixCache,
        params: CacheInitParams,
        *,
        options: ImportanceOptions,
        policy: ImportancePolicy,
        ghost_pages: int,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(cache, params)
        self.options = options
        self.policy = policy
        self.counters = Counters()
        self._recorder = recorder
        self.tree = AnnotatedTree(params.page_size, policy, self.counters, ghost_pages=ghost_pages)
        self.events = EventLog(self)
        self.body_mass = BodyMassBook(self.tree)
        self.pins = Pinning(self)
        self.gating: Gating | None = None
        self.ledger: LedgerFeed | None = None
        """What is told of finished requests, to outlive the server."""
        self._popped: list[UnifiedTreeNode] = []

    # ---- leaves ----

    def watch_leaves(self) -> None:
        """Takes over the leaf sets of a tree core that has just been reset."""
        core = self.tree_core
        assert not core.evictable_device_leaves, "watch an empty tree"
        assert not core.evictable_host_leaves, "watch an empty tree"
        self.policy.reset()
        self.tree.watch(core)
        self.body_mass.clear()
        self.counters.calibration.clear()
        if self.gating is not None:
            self.gating.gate.reset()
        self.pins.reset()
        self.events.reset()
        if self._recorder is not None:
            self._recorder.reset(self.policy.clock)
        core.evictable_device_leaves = WatchedLeaves(self._enter_device, self._leave_device)
        core.evictable_host_leaves = WatchedLeaves(self._enter_host, self._leave_host)

    def _enter_device(self, node: UnifiedTreeNode) -> None:
        self.policy.enter(Tier.DEVICE, node.id, self.tree.metadata(node), below=self.tier_below_device(node))

    def _leave_device(self, node: UnifiedTreeNode) -> None:
        self.policy.leave(Tier.DEVICE, node.id)

    def _enter_host(self, node: UnifiedTreeNode) -> None:
        is_prefetched = self.tree.known(node) is None  # nodes that a request computed are known before
        metadata = self.tree.metadata(node)
        metadata.in_storage |= is_prefetched
        if is_prefetched:
            self.events.prefetched(node)
        self.policy.enter(Tier.HOST, node.id, metadata, below=self.tier_below_host(metadata))

    def _leave_host(self, node: UnifiedTreeNode) -> None:
        self.policy.leave(Tier.HOST, node.id)

    def refresh(self, node: UnifiedTreeNode) -> None:
        """Ranks a node again whose facts changed while it was evictable."""
        if node in self.tree_core.evictable_device_leaves:
            self._enter_device(node)
        elif node in self.tree_core.evictable_host_leaves:
            self._enter_host(node)

    def tier_below_device(self, node: UnifiedTreeNode) -> Tier | None:
        """Where the KV would be after its eviction from the device; None where it would be lost."""
        return Tier.HOST if node.backuped or self.tree_core.is_write_back else None

    @staticmethod
    def tier_below_host(metadata: NodeMetadata) -> Tier | None:
        return Tier.STORAGE if metadata.in_storage else None

    # ---- upstream's tree events ----

    def redistribute_on_node_split(self, new_parent: UnifiedTreeNode, child: UnifiedTreeNode) -> None:
        super().redistribute_on_node_split(new_parent, child)
        self.tree.split(new_parent, child)
        self.body_mass.remove(child)
        for part in (new_parent, child):
            self.body_mass.update(part)
        if self.ledger is not None:
            self.ledger.cut(child)
        self._record(EventKind.SPLIT, Tier.DEVICE, new_parent)

    def discard_deleted_session_leaf(self, node: UnifiedTreeNode) -> None:
        # Upstream calls this for every node that leaves the tree, while its parent is still linked.
        super().discard_deleted_session_leaf(node)
        self.policy.leave(Tier.DEVICE, node.id)
        self.policy.leave(Tier.HOST, node.id)
        self._record(EventKind.REMOVE, Tier.DEVICE, node)
        self.tree.removed(
            node, kept_by_importance=self._kept_by_importance(node), eviction=self._eviction_of(node)
        )

    def commit_hicache_transfer(
        self, node: UnifiedTreeNode, phase: CacheTransferPhase, transfers: Sequence[Any] = (), **kwargs: Any
    ) -> None:
        super().commit_hicache_transfer(node, phase, transfers, **kwargs)
        # A host copy makes the device copy cheap to restore.
        self.refresh(node)
        self._record_transfer(node, phase, transfers)

    def worth_storing(self, node: UnifiedTreeNode) -> list[UnifiedTreeNode]:
        """What to hand to the storage tier now that the node may be: ancestors first, or nothing."""
        return [node] if self.gating is None else self.gating.storage_chain(node, can_wait=True)

    def stored(self, node: UnifiedTreeNode) -> None:
        """The node's pages were handed to the storage tier."""
        self.tree.metadata(node).in_storage = True
        self.counters.written_tokens[Tier.STORAGE] += len(node.key)
        self.refresh(node)
        self._record(EventKind.BACK_UP, Tier.STORAGE, node)

    def _record(self, kind: EventKind, tier: Tier, node: UnifiedTreeNode, *, rid: str | None = None) -> None:
        self.events.record(kind, tier, node)
        if self._recorder is not None:
            self._recorder.event(kind, tier, node, self.tree, clock=self.policy.clock, rid=rid)

    def _record_transfer(
        self, node: UnifiedTreeNode, phase: CacheTransferPhase, transfers: Sequence[Any]
    ) -> None:
        if not transfers:
            return
        if phase is CacheTransferPhase.BACKUP_HOST:
            self.counters.written_tokens[Tier.HOST] += len(node.key)
            self._record(EventKind.BACK_UP, Tier.HOST, node)
        elif phase is CacheTransferPhase.LOAD_BACK and transfers[0].device_indices is not None:
            for node_id in transfers[0].nodes_to_load or ():
                loaded = self.tree_core.node_by_id(node_id)
                self.tree.metadata(loaded).off_device = False
                self.counters.loaded_back(len(loaded.key))
                self.body_mass.update(loaded)
                self._record(EventKind.LOAD_BACK, Tier.DEVICE, loaded)

    # ---- eviction ----

    def _evict_device_start(self, request_cnt: int) -> None:
        self._ensure_eviction_strategy()
        self._evict_device_request_cnt = request_cnt
        self._popped = []

    def _evict_device_next_node(self, tracker: Any, *collected: Any) -> NodeId | None:
        if tracker[self.component_type] >= self._evict_device_request_cnt:
            return None
        node_id = self.policy.victim(Tier.DEVICE)
        if node_id is not None:
            self._popped.append(self.tree_core.node_by_id(node_id))
        return node_id

    def _evict_device_end(self) -> None:
        # A victim that upstream could not evict (a failed backup, say) is still a leaf: rank it again.
        for node in self._popped:
            if node in self.tree_core.evictable_device_leaves:
                self._enter_device(node)
        self._popped = []

    def drive_host_eviction(self, num_tokens: int, tracker: Any, *collected: Any) -> None:
        # Also runs inside a device walk, to make room for the backup of its victim.
        while tracker[self.component_type] < num_tokens:
            node_id = self.policy.victim(Tier.HOST)
            if node_id is None:
                break
            node = self.tree_core.node_by_id(node_id)
            if self.gating is not None and self.gating.stores_first(node):
                continue  # locked until its pages are in storage, then a leaf again
            self.tree_core._evict_host_leaf(node, tracker, *collected)

    def evict_component(self, node: UnifiedTreeNode, *args: Any, **kwargs: Any) -> tuple[int, int]:
        device_tokens, host_tokens = super().evict_component(node, *args, **kwargs)
        metadata = self.tree.metadata(node)
        if device_tokens:
            metadata.off_device = True
            self.counters.evicted_body_mass += self.body_mass.remove(node)
        below = {Tier.DEVICE: Tier.HOST if node.backuped else None, Tier.HOST: self.tier_below_host(metadata)}
        for tier, tokens in ((Tier.DEVICE, device_tokens), (Tier.HOST, host_tokens)):
            if tokens:
                reason = self.eviction_reason(metadata)
                self.counters.evicted(tier, tokens, reason, below=below[tier])
                self._record(EventKind.EVICT, tier, node)
                metadata.evicted_from = tier
        return device_tokens, host_tokens

    def _eviction_of(self, node: UnifiedTreeNode) -> Eviction | None:
        """How a node was lost that is leaving the tree."""
        metadata = self.tree.metadata(node)
        tier = metadata.evicted_from
        if tier is None:
            return None
        below = self.tier_below_host(metadata) if tier is Tier.HOST else None
        loss = self.policy.loss(tier, metadata, below=below)
        return Eviction(tier, self.policy.clock, loss, self.eviction_reason(metadata))

    def eviction_reason(self, metadata: NodeMetadata) -> EvictionReason:
        """Why the node is, or was, what eviction takes."""
        return EvictionReason.DROPPED_AFTER_USE if metadata.expendable else EvictionReason.LEAST_LOSS

    def _kept_by_importance(self, node: UnifiedTreeNode) -> bool:
        return False

    def observation(self) -> dict[str, Any] | None:
        """``observe`` only: what importance would have done with the traffic so far."""
        return None

    def check_integrity(self) -> None:
        """Asserts that orders, leaf sets and metadata agree with the tree."""
        core = self.tree_core
        self.policy.check_integrity()
        assert self.policy.evictable(Tier.DEVICE) == len(core.evictable_device_leaves)
        assert self.policy.evictable(Tier.HOST) == len(core.evictable_host_leaves)
        self.tree.check_integrity()
        self.body_mass.check_integrity()
        self.pins.check_integrity()

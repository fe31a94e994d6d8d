"""The eviction order: kept up with upstream's sets of leaves, and queried in its eviction walks.

An ``EvictionOrder`` decides. Under ``importance`` our policy chooses the victims. Under ``observe`` they are
upstream's, by an order kept between walks. After a fault upstream chooses itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, UnifiedTreeNode

from sgl_importance.metrics_table import FaultPlace
from sgl_importance.nodes.ghosts import EvictionReason
from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.tiers import Tier
from sglang_importance.tree.leaf_sets import LeafEvent, WatchedLeaves
from sglang_importance.tree.model_states import lacks_state
from sglang_importance.tree.recency_order import RecencyOrder
from sglang_importance.tree.state import TreeState
from sglang_importance.upstream.nodes import NodeId


class RankedLeaves:
    """Enters the evictable leaves of device and host into the policy, with the tier below that has a copy.

    Args:
        recency: upstream's order of each tier, where that is followed too.
    """

    def __init__(self, state: TreeState, recency: Mapping[Tier, RecencyOrder] | None = None) -> None:
        self._state = state
        self.recency = recency or {}
        self._unknown_host_leaves: list[UnifiedTreeNode] = []

    def watch(self, core: UnifiedTreeCore) -> None:
        """Takes over the leaf sets of a tree core that has just been reset."""
        assert not core.evictable_device_leaves, "watch an empty tree"
        assert not core.evictable_host_leaves, "watch an empty tree"
        self._unknown_host_leaves = []
        core.evictable_device_leaves = WatchedLeaves(
            self._guarded(self._device_leaf), self._guarded(self._leave_device)
        )
        core.evictable_host_leaves = WatchedLeaves(
            self._guarded(self._host_leaf), self._guarded(self._leave_host)
        )
        if self.recency:
            self.recency[Tier.DEVICE].reset(core.evictable_device_leaves)
            self.recency[Tier.HOST].reset(core.evictable_host_leaves)

    def _guarded(self, follow: LeafEvent) -> LeafEvent:
        faults = self._state.faults
        return lambda node: faults.learn(FaultPlace.RANKING, follow, node)

    @property
    def _core(self) -> UnifiedTreeCore:
        return self._state.tree.core

    def _device_leaf(self, node: UnifiedTreeNode) -> None:
        if self.recency:
            self.recency[Tier.DEVICE].add(node)
        self.enter_device(node)

    def _host_leaf(self, node: UnifiedTreeNode) -> None:
        if self.recency:
            self.recency[Tier.HOST].add(node)
        self._enter_host(node)

    def enter_device(self, node: UnifiedTreeNode) -> None:
        """The node became evictable from the device, or its facts changed while it was."""
        metadata = self._state.tree.known(node)
        if metadata is None:
            return  # it is being inserted, and is entered again after ``take_in``
        metadata.lacks_state = lacks_state(node)
        below = self._tier_below_device(node, metadata)
        self._state.policy.enter(Tier.DEVICE, node.id, metadata, below=below)

    def _leave_device(self, node: UnifiedTreeNode) -> None:
        if self.recency:
            self.recency[Tier.DEVICE].discard(node)
        self._state.policy.leave(Tier.DEVICE, node.id)

    def _enter_host(self, node: UnifiedTreeNode) -> None:
        metadata = self._state.tree.known(node)
        if metadata is None:  # storage brought it: KV that a request computed has metadata before
            self._unknown_host_leaves.append(node)
            return
        metadata.lacks_state = lacks_state(node)
        self._state.policy.enter(Tier.HOST, node.id, metadata, below=tier_below_host(metadata))

    def take_unknown_host_leaves(self) -> list[UnifiedTreeNode]:
        """Host leaves without metadata, maybe repeated: those that storage brought since the last call."""
        leaves, self._unknown_host_leaves = self._unknown_host_leaves, []
        return leaves

    def _leave_host(self, node: UnifiedTreeNode) -> None:
        if self.recency:
            self.recency[Tier.HOST].discard(node)
        self._state.policy.leave(Tier.HOST, node.id)

    def refresh(self, node: UnifiedTreeNode) -> None:
        """Ranks a node again whose facts changed while it was evictable."""
        if node in self._core.evictable_device_leaves:
            self.enter_device(node)
        elif node in self._core.evictable_host_leaves:
            self._enter_host(node)

    def got_state(self, node: UnifiedTreeNode) -> None:
        """A state of linear attention was put at the node's end."""
        if (metadata := self._state.tree.known(node)) is not None:
            metadata.lacks_state = False
            self.refresh(node)

    def host_state_changed(self, node: UnifiedTreeNode) -> None:
        """A state in host memory went or came, at the node's end or below it: the node is ranked again, and
        the leaf of the device that it follows."""
        if self._state.tree.known(node) is not None:  # else it is ranked as soon as it is taken in
            self.refresh(node)
        while node.evicted and node.parent is not None:
            node = node.parent
        self.refresh(node)

    def left_tree(self, node: UnifiedTreeNode) -> None:
        self._leave_device(node)
        self._leave_host(node)

    def _tier_below_device(self, node: UnifiedTreeNode, metadata: NodeMetadata) -> Tier | None:
        """Tier that keeps the KV after its eviction from the device; None where it would be lost."""
        if node.backuped or self._core.is_write_back:
            return Tier.HOST
        return tier_below_host(metadata)

    def loss(self, node: UnifiedTreeNode) -> float:
        """Marginal loss of evicting the node from the fastest tier that holds it."""
        metadata = self._state.tree.metadata(node)
        metadata.lacks_state = lacks_state(node)
        if node.evicted:
            return self._state.policy.loss(Tier.HOST, metadata, below=tier_below_host(metadata))
        below = self._tier_below_device(node, metadata)
        return self._state.policy.loss(Tier.DEVICE, metadata, below=below)

    def check_integrity(self) -> None:
        """Asserts that the policy knows exactly the leaves that upstream may evict."""
        policy = self._state.policy
        policy.check_integrity()
        assert policy.evictable(Tier.DEVICE) == len(self._core.evictable_device_leaves)
        assert policy.evictable(Tier.HOST) == len(self._core.evictable_host_leaves)
        for order in self.recency.values():
            order.check_integrity()


def tier_below_host(metadata: NodeMetadata) -> Tier | None:
    """Tier that keeps the KV after its eviction from the host; None where it would be lost."""
    return Tier.STORAGE if metadata.in_storage else None


class EvictionOrder(ABC):
    """The order of eviction, in the steps of an eviction walk of upstream's over the device."""

    def deciding(self) -> AbstractContextManager[None]:
        """While a walk over the host runs, alone or within one over the device, or one over states."""
        return nullcontext()

    @abstractmethod
    def begin(self) -> None:
        """A walk over the device begins."""

    @abstractmethod
    def device_victim(self) -> NodeId | None:
        """The next leaf of the device; None where there is none."""

    @abstractmethod
    def host_victim(self) -> NodeId | None:
        """The next leaf of the host; None where there is none."""

    @abstractmethod
    def end(self) -> None:
        """The walk is over; victims that could not be evicted are leaves still."""

    @abstractmethod
    def reason(self, metadata: NodeMetadata) -> EvictionReason:
        """Reason of the node's eviction, present or past."""


class MarginalLossOrder(EvictionOrder):
    """``importance``: the leaf of least marginal loss is evicted.

    Where a model has sliding windows in a pool of their own, upstream makes room for these by itself, least
    recently used first. The whole leaves that it takes then are not ours. States of linear attention have an
    order of ours (``state_order``).
    """

    def __init__(self, state: TreeState, leaves: RankedLeaves) -> None:
        self._state = state
        self._leaves = leaves
        self._taken: list[UnifiedTreeNode] = []
        self._walks = 0

    @contextmanager
    def deciding(self) -> Iterator[None]:
        self._walks += 1
        try:
            yield
        finally:
            self._walks -= 1

    def begin(self) -> None:
        self._taken = []
        self._walks += 1

    def device_victim(self) -> NodeId | None:
        node_id = self._state.policy.victim(Tier.DEVICE)
        if node_id is not None:
            self._taken.append(self._state.tree.core.node_by_id(node_id))
        return node_id

    def host_victim(self) -> NodeId | None:
        return self._state.policy.victim(Tier.HOST)

    def end(self) -> None:
        for node in self._taken:
            if node in self._state.tree.core.evictable_device_leaves:
                self._leaves.enter_device(node)
        self._taken = []
        self._walks -= 1

    def reason(self, metadata: NodeMetadata) -> EvictionReason:
        if not self._walks:
            return EvictionReason.STOCK_ORDER
        if metadata.is_given_back:
            return EvictionReason.SESSION_OVER
        return EvictionReason.DROPPED_AFTER_USE if metadata.expendable else EvictionReason.LEAST_LOSS


class StockOrder(EvictionOrder):
    """``observe``: upstream's victims in upstream's order. What ours would have kept, shadow caches say."""

    def __init__(self, recency: Mapping[Tier, RecencyOrder]) -> None:
        self._recency = recency

    def begin(self) -> None:
        self._recency[Tier.DEVICE].begin()

    @contextmanager
    def deciding(self) -> Iterator[None]:
        recency = self._recency[Tier.HOST]
        recency.begin()
        try:
            yield
        finally:
            recency.end()

    def device_victim(self) -> NodeId | None:
        node = self._recency[Tier.DEVICE].next()
        return None if node is None else node.id

    def host_victim(self) -> NodeId | None:
        node = self._recency[Tier.HOST].next()
        return None if node is None else node.id

    def end(self) -> None:
        self._recency[Tier.DEVICE].end()

    def reason(self, metadata: NodeMetadata) -> EvictionReason:
        return EvictionReason.STOCK_ORDER

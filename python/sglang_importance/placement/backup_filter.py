"""Admission of the copies to lower tiers that upstream offers to make.

Upstream's write policy says when a copy is offered:

- ``write_through``: when a request's insert walks over a node that has no host copy;
- ``write_through_selective``: the same, from upstream's second count of the node on. Up to 0.5.21 that is at
  the end of the request that brought it, from 0.5.22 on with the second request that finds it. With a gate:
  from the second admitted request on, whether it finds the node or has to bring it again;
- ``write_back``: when the device evicts the node, and a refused node is dropped; or when it gives up a state
  or a window of a node that stays, which go to the host with the node's KV or not at all.

Under ``importance`` no copy is made of expendable nodes. Where a gate (``ranking.write_gate``) is open it
decides about all others. Upstream backs a node up together with its ancestors that have no copy, so one
answer stands for the chain. A copy to storage is offered with every ancestor that has none: a storage hit
stops at the first missing page. It is offered when the host got its copy and whenever a request that used it
ends (then only nodes that are likely to come back are written), and once more when the host is about to
evict it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sgl_importance.metrics_table import FaultPlace
from sgl_importance.ranking.write_gate import GateSettings, WriteGate
from sgl_importance.tiers import Tier
from sglang_importance.tree.faults import upstream
from sglang_importance.tree.occupancy import capacity_tokens
from sglang_importance.tree.state import TreeState
from sglang_importance.upstream.nodes import key_of

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, UnifiedTreeNode
    from sglang.srt.mem_cache.unified_radix_cache import NodeId, UnifiedRadixCache

MAX_WRITING_SHARE = 1 / 8
"""Part of the host pool that may be locked by writes to storage before an eviction goes on without."""


class StorageTier(Protocol):
    """The part of a cache, upstream's and ours, that writes to storage."""

    enable_storage: bool
    ongoing_backup: dict[Any, tuple[Any, Any]]

    def write_backup_storage(self, node_id: NodeId) -> None:
        """Offers a node that the host holds."""

    def store_chain(self, chain: Sequence[UnifiedTreeNode]) -> None:
        """Writes nodes that the host holds, ancestors first."""


def open_gate(cache: UnifiedRadixCache, state: TreeState) -> WriteGate | None:
    """The gate of a cache whose tiers are built; None where none is wanted or nothing is below the device."""
    options = state.options
    if not options.use_gate or cache.cache_controller is None:
        return None
    capacities = {
        Tier.HOST: capacity_tokens(cache)[Tier.HOST] * state.policy.cost.bytes_per_token,
        Tier.STORAGE: options.store_bytes if options.store else None,
    }
    return WriteGate(state.policy, capacities, GateSettings(storage_payback=options.gate_payback))


class BackupFilter:
    """Asked ahead of every copy to a lower tier.

    Two methods of the tree core are wrapped on the instance, which outlives a reset of the tree.

    Args:
        core: of the tree.
        storage: takes nodes of the host.
        host_tokens: size of the host tier; 0 where there is none.
        gate: decides about copies; None makes all that are offered.
    """

    def __init__(
        self,
        state: TreeState,
        core: UnifiedTreeCore,
        storage: StorageTier,
        *,
        host_tokens: int,
        gate: WriteGate | None,
    ) -> None:
        self.gate = gate
        self._state = state
        self._core = core
        self._storage = storage
        self._host_tokens = host_tokens
        self._counts_hit: Callable[..., bool] = core._inc_hit_count_and_check
        self._evict_leaf: Callable[..., Any] = core.evict_device_leaf
        core._inc_hit_count_and_check = self._offer_backup  # type: ignore[assignment,method-assign]  # on this instance
        core.evict_device_leaf = self._evict_device_leaf  # type: ignore[method-assign]  # on this instance

    def reset(self) -> None:
        """The tiers are empty again."""
        if self.gate is not None:
            self.gate.reset()

    def admitted(self) -> None:
        """One more request was admitted."""
        if self.gate is not None:
            self.gate.tick()

    # ---- host ----

    def _offer_backup(
        self, node: UnifiedTreeNode, *chunked: bool
    ) -> bool:  # which later releases do not pass
        faults = self._state.faults
        is_offered = self._counts_hit(node, *chunked)
        if self._core.enable_external_cache_linker:
            return is_offered  # copies to another cache, not to a tier of ours
        if not is_offered and (any(chunked) or not faults.learn(FaultPlace.RANKING, self._came_back, node)):
            return False
        return faults.learn(FaultPlace.RANKING, self._copies_to_host, node) is not False

    def _came_back(self, node: UnifiedTreeNode) -> bool:
        """Whether the node is on offer under the selective policy, though upstream has counted it once only:
        its count begins anew with each eviction."""
        if self.gate is None or not self._is_selective or node.evicted or node.backuped:
            return False
        known = self._state.tree.known(node)
        return known is not None and known.accesses > 0

    @property
    def _is_selective(self) -> bool:
        return not self._core.is_write_back and self._core.write_through_threshold > 1

    def _copies_to_host(self, node: UnifiedTreeNode) -> bool:
        # The gate counts what it admits as written.
        return not self._is_expendable(node) and self._passes_gate(node)

    def _passes_gate(self, node: UnifiedTreeNode) -> bool:
        if self.gate is None:
            return True
        if self._is_selective and not self._state.tree.metadata(node).accesses:
            return False
        return self._admits(Tier.HOST, _chain(node, lambda ancestor: bool(ancestor.backuped)))

    def _evict_device_leaf(self, node_id: NodeId, is_write_back: bool) -> Any:
        if is_write_back:
            node = self._core.node_by_id(node_id)
            if self._state.faults.learn(FaultPlace.RANKING, self._drops, node):
                is_write_back = False  # upstream then deletes the leaf, as under write-through
        return self._evict_leaf(node_id, is_write_back)

    def copies_with_state(self, node_id: NodeId) -> bool:
        """Whether a node whose state or window the device gives up is copied to the host before, under
        ``write_back``."""
        node = self._core.node_by_id(node_id)
        return self._state.faults.learn(FaultPlace.RANKING, self._copies_with_state, node) is not False

    def _copies_with_state(self, node: UnifiedTreeNode) -> bool:
        if node.backuped:
            return True
        if self._is_expendable(node):
            return False
        owed = self._state.tree.metadata(node).owed_to_storage
        return self.gate is None or owed or self._admits(Tier.HOST, [node])

    def _drops(self, node: UnifiedTreeNode) -> bool:
        """Whether a node that the device evicts is dropped without a copy on the host."""
        # Copies of its descendants in lower tiers could not be reached without it.
        if node.backuped or node.children:
            return False
        if self._is_expendable(node):
            return True
        if self.gate is None or self._state.tree.metadata(node).owed_to_storage:
            return False
        return not self._admits(Tier.HOST, [node])

    def _is_expendable(self, node: UnifiedTreeNode) -> bool:
        known = self._state.tree.known(node)
        return known is not None and known.expendable

    # ---- storage ----

    def worth_storing(self, node: UnifiedTreeNode) -> list[UnifiedTreeNode]:
        """The nodes to hand to the storage tier now that this one may be: ancestors first, or none."""
        if self.gate is None:
            return [node]
        chain = self._state.faults.learn(FaultPlace.RANKING, self._storage_chain, node, can_wait=True)
        return [node] if chain is None else chain

    def _storage_chain(self, node: UnifiedTreeNode, *, can_wait: bool) -> list[UnifiedTreeNode]:
        """The nodes to write for this one to be found in storage, root side first; empty where that is not
        worth its bytes, or not possible."""
        tree = self._state.tree
        if not node.backuped or tree.metadata(node).in_storage:
            return []
        chain = _chain(node, lambda ancestor: tree.metadata(ancestor).in_storage)
        written = [part for part in chain if part.backuped]
        owed = [part for part in chain if not part.backuped]
        assert not owed or self._core.is_write_back
        must = tree.metadata(node).owed_to_storage
        if not must and not self._admits(Tier.STORAGE, written, can_wait=can_wait):
            return []
        # Under write-back an ancestor may be on the device only: it follows as soon as the host has its copy.
        for part in owed:
            tree.metadata(part).owed_to_storage = True
        return written

    def stores_first(self, node: UnifiedTreeNode) -> bool:
        """The host is about to evict the node: whether it is written to storage instead, which locks it.

        The nodes being written stay a small share of the host, so that eviction never starves.
        """
        if self.gate is None:
            return False
        if self._writes_first(node):
            return True
        self.gate.gave_up(Tier.HOST, self._state.tree.metadata(node))
        return False

    def _writes_first(self, node: UnifiedTreeNode) -> bool:
        if not self._storage.enable_storage:
            return False
        writing = sum(
            len(key_of(self._core.node_by_id(node_id)))
            for node_id, _ in self._storage.ongoing_backup.values()
        )
        if writing + len(key_of(node)) > MAX_WRITING_SHARE * self._host_tokens:
            return False
        chain = self._storage_chain(node, can_wait=False)
        with upstream():
            self._storage.store_chain(chain)
        return bool(chain)

    def offer_again(self, path: Sequence[UnifiedTreeNode]) -> None:
        """A request that used the path has ended: offers the nodes that were refused before once more."""
        if self.gate is None or not self._storage.enable_storage:
            return
        for node in path:
            settled = node.backuped and node.write_through_pending_id is None
            if settled and not self._state.tree.metadata(node).in_storage:
                with upstream():
                    self._storage.write_backup_storage(node.id)

    def _admits(self, tier: Tier, chain: Sequence[UnifiedTreeNode], *, can_wait: bool = False) -> bool:
        assert self.gate is not None
        metadata = [self._state.tree.metadata(node) for node in chain]
        admitted = self.gate.admits(tier, metadata, can_wait=can_wait)
        tokens = sum(node.tokens for node in metadata)
        self._state.counters.offered(tier, tokens, refusal=None if admitted else self.gate.refusal)
        return admitted


def _chain(node: UnifiedTreeNode, has_copy: Callable[[UnifiedTreeNode], bool]) -> list[UnifiedTreeNode]:
    """The node and its ancestors up to the first that has a copy, root side first."""
    chain = [node]
    while (parent := chain[-1].parent) is not None and parent.parent is not None and not has_copy(parent):
        chain.append(parent)
    return chain[::-1]

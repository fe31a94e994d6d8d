"""Asks the gate ahead of every copy that upstream would make.

Upstream's write policy says when a copy is offered; the gate says whether it is made:

- ``write_through``: when a request's insert walks over a node that has no host copy;
- ``write_through_selective``: the same, from the second admitted request on that found the node (upstream's
  own count reaches two at the end of the first);
- ``write_back``: when the device evicts the node; what is refused is dropped.

Upstream backs a node up together with its ancestors that have no copy, so one answer stands for the chain.
What goes to storage is offered with every ancestor that is not there yet: a storage hit stops at the first
missing page. It is offered when the host got its copy and whenever a request that used it ends, where only
what is likely to come back is written, and once more when the host is about to evict it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sgl_importance.cost import Tier
from sgl_importance.placement.gate import GateSettings, WriteGate

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, UnifiedTreeNode
    from sglang.srt.mem_cache.unified_radix_cache import NodeId

    from sgl_importance.options import ImportanceOptions
    from sglang_importance.radix_cache.importance_cache import ImportanceRadixCache
    from sglang_importance.radix_cache.ranked_component import RankedComponent

MAX_WRITING_SHARE = 1 / 8
"""Part of the host pool that may be locked by writes to storage before an eviction goes on without."""


def open_gate(cache: ImportanceRadixCache, options: ImportanceOptions) -> Gating | None:
    """The gate of a cache whose tiers are built; None where there is no tier below the device."""
    if cache.cache_controller is None:
        return None
    component = cache.importance
    host_tokens = int(cache.cache_controller.mem_pool_host.size)
    capacities = {
        Tier.HOST: host_tokens * component.policy.cost.bytes_per_token,
        Tier.STORAGE: options.store_bytes if options.store else None,
    }
    settings = GateSettings(storage_payback=options.gate_payback)
    return Gating(component, WriteGate(component.policy, capacities, settings))


class Gating:
    """The gate on one tree.

    Two methods of the tree core are wrapped on the instance, which outlives a reset of the tree.

    Args:
        component: its metadata, counters and tree core.
        gate: decides.
    """

    def __init__(self, component: RankedComponent, gate: WriteGate) -> None:
        self.gate = gate
        self._component = component
        core = component.tree_core
        self._counts_hit: Callable[..., bool] = core._inc_hit_count_and_check
        self._evict_leaf: Callable[..., Any] = core.evict_device_leaf
        core._inc_hit_count_and_check = self._offer_backup
        core.evict_device_leaf = self._evict_device_leaf

    @property
    def _core(self) -> UnifiedTreeCore:
        return self._component.tree_core

    @property
    def _is_selective(self) -> bool:
        return not self._core.is_write_back and self._core.write_through_threshold > 1

    # ---- host ----

    def _offer_backup(self, node: UnifiedTreeNode, chunked: bool = False) -> bool:
        if not self._counts_hit(node, chunked):
            return False
        if self._core.enable_external_cache_linker:
            return True  # copies to another cache, not to a tier of ours
        if self._is_selective and not self._component.tree.metadata(node).accesses:
            return False
        return self._admits(Tier.HOST, self._chain(node, lambda ancestor: bool(ancestor.backuped)))

    def _evict_device_leaf(self, node_id: NodeId, is_write_back: bool) -> Any:
        if is_write_back:
            node = self._core.node_by_id(node_id)
            # What the host or storage holds of its descendants could not be reached without it.
            must = bool(node.children) or self._component.tree.metadata(node).owed_to_storage
            if not node.backuped and not must and not self._admits(Tier.HOST, [node]):
                is_write_back = False  # upstream then deletes the leaf, as under write-through
        return self._evict_leaf(node_id, is_write_back)

    # ---- storage ----

    def storage_chain(self, node: UnifiedTreeNode, *, can_wait: bool) -> list[UnifiedTreeNode]:
        """What has to be written for the node to be found in storage, root side first; empty where that is
        not worth its bytes, or not possible."""
        tree = self._component.tree
        if not node.backuped or tree.metadata(node).in_storage:
            return []
        chain = self._chain(node, lambda ancestor: tree.metadata(ancestor).in_storage)
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

        What is being written stays a small share of the host, so that eviction never starves.
        """
        self.gate.gave_up(Tier.HOST, self._component.tree.metadata(node))
        cache = self._component.cache
        if not cache.enable_storage:
            return False
        writing = sum(len(self._core.node_by_id(node_id).key) for node_id, _ in cache.ongoing_backup.values())
        if writing + len(node.key) > MAX_WRITING_SHARE * cache.cache_controller.mem_pool_host.size:
            return False
        chain = self.storage_chain(node, can_wait=False)
        cache.store_chain(chain)
        return bool(chain)

    def offer_again(self, path: list[UnifiedTreeNode]) -> None:
        """A request that used the path has ended: what was refused so far has been asked for since."""
        cache = self._component.cache
        if not cache.enable_storage:
            return
        for node in path:
            settled = node.backuped and node.write_through_pending_id is None
            if settled and not self._component.tree.metadata(node).in_storage:
                cache.write_backup_storage(node.id)

    # ---- both ----

    def _chain(
        self, node: UnifiedTreeNode, has_copy: Callable[[UnifiedTreeNode], bool]
    ) -> list[UnifiedTreeNode]:
        chain = [node]
        while (parent := chain[-1].parent) is not None and parent.parent is not None and not has_copy(parent):
            chain.append(parent)
        return chain[::-1]

    def _admits(self, tier: Tier, chain: list[UnifiedTreeNode], *, can_wait: bool = False) -> bool:
        metadata = [self._component.tree.metadata(node) for node in chain]
        admitted = self.gate.admits(tier, metadata, can_wait=can_wait)
        tokens = sum(node.tokens for node in metadata)
        self._component.counters.offered(tier, tokens, refusal=None if admitted else self.gate.refusal)
        return admitted

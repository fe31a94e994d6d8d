"""The tree component of linear attention's states: upstream's own, whose victims our policy may choose."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.unified_cache.components import CacheTransferPhase, ComponentType, MambaComponent
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, UnifiedTreeNode
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sgl_importance.metrics_table import FaultPlace
from sglang_importance.cache.component import ImportanceComponent
from sglang_importance.tree.state import TreeState
from sglang_importance.tree.state_order import StateOrder
from sglang_importance.upstream.nodes import NodeId

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.components import InternalStateBackup


class StateComponent(MambaComponent):
    """Tells the order of leaves where a state is, and chooses which states go under ``importance``.

    Upstream's walk takes the node at its cursor: of an inner node the state alone, of a leaf all of it. Our
    order moves that cursor. Where it has no more to offer, or after a fault, upstream's walk goes on from its
    own beginning. States in host memory go in upstream's order.

    Args:
        state: of the tree; ``observe`` keeps upstream's victims.
    """

    tree_core: UnifiedTreeCore

    def __init__(self, cache: UnifiedRadixCache, params: CacheInitParams, *, state: TreeState) -> None:
        super().__init__(cache, params)
        self._faults = state.faults
        self.order = StateOrder(state) if state.options.policy == "importance" else None
        self._walk: ExitStack | None = None  # while our order decides

    @property
    def _tokens(self) -> ImportanceComponent:
        component = self.cache.components[ComponentType.FULL]
        assert isinstance(component, ImportanceComponent)
        return component

    def commit_insert_component_data(self, node: UnifiedTreeNode, *args: Any, **kwargs: Any) -> None:
        super().commit_insert_component_data(node, *args, **kwargs)
        self._faults.learn(FaultPlace.TREE_EVENT, self._tokens.leaves.got_state, node)

    def commit_hicache_transfer(
        self, node: UnifiedTreeNode, phase: CacheTransferPhase, *args: Any, **kwargs: Any
    ) -> None:
        super().commit_hicache_transfer(node, phase, *args, **kwargs)
        if phase is CacheTransferPhase.PREFETCH:  # of what follows the node
            found = getattr(kwargs.get("insert_result"), "inserted_host_node", None)
            end = node if found is None else self.tree_core.node_by_id(found)
            self._faults.learn(FaultPlace.TREE_EVENT, self._tokens.leaves.host_state_changed, end)

    def evict_component(self, node: UnifiedTreeNode, *args: Any, **kwargs: Any) -> tuple[int, int]:
        device_states, host_states = super().evict_component(node, *args, **kwargs)
        if host_states:
            self._faults.learn(FaultPlace.TREE_EVENT, self._tokens.leaves.host_state_changed, node)
        return device_states, host_states

    def _evict_device_start(self, request_cnt: int) -> None:
        super()._evict_device_start(request_cnt)
        if self.order is None or not self._faults.is_learning:
            return
        self._faults.learn(FaultPlace.RANKING, self.order.begin)
        if self._faults.is_learning:
            self._walk = ExitStack()
            self._walk.enter_context(self._tokens.order.deciding())

    def _evict_device_next_node(
        self, tracker: Any, *collected: Any, **named: Any
    ) -> NodeId | InternalStateBackup | None:
        if self._walk is not None and tracker[self.component_type] < self._evict_device_request_cnt:
            assert self.order is not None
            victim = self._faults.learn(FaultPlace.RANKING, self.order.next)
            if victim is None:
                self._leave_to_upstream()
                super()._evict_device_start(self._evict_device_request_cnt)
            else:
                self._evict_device_cursor = victim
        return super()._evict_device_next_node(tracker, *collected, **named)

    def _evict_device_end(self) -> None:
        self._leave_to_upstream()
        super()._evict_device_end()

    def _leave_to_upstream(self) -> None:
        walk, self._walk = self._walk, None
        if walk is not None:
            walk.close()

"""``--kv-policy observe``: stock evicts, importance says what it would have done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components import FullComponent

from sgl_importance.cost import Tier
from sgl_importance.fold import QueryFolds
from sgl_importance.ghost import EvictionReason
from sgl_importance.node import NodeMetadata
from sglang_importance.observe.shadowing import Shadowing
from sglang_importance.radix_cache.component import ImportanceComponent

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from sglang.srt.mem_cache.unified_radix_cache import NodeId


class ObserverComponent(ImportanceComponent):
    """Upstream's victims in upstream's order; ours are only compared with them.

    Before each device eviction we ask our order for victims of the same size. A node that only we would have
    evicted and that is hit later counts as lost; a node that only stock evicted and that comes back counts
    as saved. Both look one eviction ahead. The diverging history of a server that really ran ours is what
    the shadow caches follow.

    Args:
        shadowing: told of every request; None compares one eviction ahead only.
    """

    def __init__(self, *args: Any, shadowing: Shadowing | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ours: set[int] = set()
        self._shadowing = shadowing

    def watch_leaves(self) -> None:
        super().watch_leaves()
        if self._shadowing is not None:
            self._shadowing.reset()

    def _admit(self, req: Req, cached_tokens: int) -> QueryFolds:
        if self._shadowing is not None:
            self._shadowing.admitted(req)
            self._shadowing.count(self.counters)
        return super()._admit(req, cached_tokens)

    def cleanup_after_caching_req(self, req: Req, is_finished: bool, *args: Any, **kwargs: Any) -> None:
        super().cleanup_after_caching_req(req, is_finished, *args, **kwargs)
        if is_finished and self._shadowing is not None:
            self._shadowing.finished(req)

    def observation(self) -> dict[str, Any] | None:
        if self._shadowing is None:
            return None
        ahead = ("saved", "lost", "agreed")
        return {
            **self._shadowing.document(),
            "one_eviction_ahead": {
                f"{name}_tokens": getattr(self.counters, f"observed_{name}_tokens") for name in ahead
            },
        }

    def _evict_device_start(self, request_cnt: int) -> None:
        FullComponent._evict_device_start(self, request_cnt)
        self._popped = []
        tokens = 0
        while tokens < request_cnt and (node_id := self.policy.victim(Tier.DEVICE)) is not None:
            node = self.tree_core.node_by_id(node_id)
            self._popped.append(node)
            tokens += self.tree.metadata(node).tokens
        self._ours = {node.id for node in self._popped}
        for node in self._popped:
            self._enter_device(node)

    def _evict_device_next_node(self, tracker: Any, *collected: Any) -> NodeId | None:
        node_id = FullComponent._evict_device_next_node(self, tracker, *collected)
        if node_id is not None and node_id in self._ours:
            self.counters.observed_agreed_tokens += self.tree.metadata(
                self.tree_core.node_by_id(node_id)
            ).tokens
        return node_id

    def _evict_device_end(self) -> None:
        FullComponent._evict_device_end(self)
        for node in self._popped:
            if node in self.tree_core.evictable_device_leaves:
                self.tree.metadata(node).doomed = True
        self._popped = []
        self._ours = set()

    def drive_host_eviction(self, num_tokens: int, tracker: Any, *collected: Any) -> None:
        FullComponent.drive_host_eviction(self, num_tokens, tracker, *collected)

    def _kept_by_importance(self, node: UnifiedTreeNode) -> bool:
        return self.is_evict_device_ongoing and node.id not in self._ours

    def eviction_reason(self, metadata: NodeMetadata) -> EvictionReason:
        return EvictionReason.STOCK_ORDER

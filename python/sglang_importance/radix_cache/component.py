"""The tree component: one access and one fold per query, and what placement makes of each request."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from sgl_importance.cost import Tier
from sgl_importance.fold import QueryFolds
from sgl_importance.node import transition_after
from sgl_importance.options import ImportanceOptions
from sgl_importance.reuse_class import BlockType, Transition
from sgl_importance.trace.records import EventKind
from sglang_importance.metrics.publisher import MetricsPublisher
from sglang_importance.placement.hint_follower import HintFollower
from sglang_importance.placement.prewarm_request import is_prewarm
from sglang_importance.radix_cache.ranked_component import RankedComponent
from sglang_importance.tree.deferred_work import AfterAnswers
from sglang_importance.tree.folding import Folding

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, InsertResult
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from sglang.srt.mem_cache.unified_radix_cache import NodeId, UnifiedRadixCache

QUERY_ATTRIBUTE = "importance_query"


class ImportanceComponent(RankedComponent):
    """What happens to the tree as requests come and go: accesses, folds, pins, hints and the ledger.

    A running request locks its path, so nothing is folded while it decodes: what its queries saw is handed
    to the nodes at prefill end and at finish, retraction or abort, behind the answers of the same pass.

    Args:
        options: what the operator chose; ``observe`` keeps upstream's victims.
        metrics: where counts are published after each request; None publishes nothing.
        ranking: further arguments of ``RankedComponent``.
    """

    def __init__(
        self,
        cache: UnifiedRadixCache,
        params: CacheInitParams,
        *,
        options: ImportanceOptions,
        metrics: MetricsPublisher | None = None,
        **ranking: Any,
    ) -> None:
        super().__init__(cache, params, options=options, **ranking)
        self._metrics = metrics
        self._folding = Folding(options, self.policy, self.tree, self.counters, self._recorder)
        self.after_answers = AfterAnswers()
        """What a request said is taken in when its answer is on its way."""
        self._inserting: QueryFolds | None = None
        self._inserting_rid: str | None = None
        self._hints = HintFollower(self.tree, self.policy, self.pins, observe=options.policy == "observe")

    # ---- requests ----

    def prepare_for_caching_req(
        self, req: Req, insert_params: InsertParams, token_ids_len: int, is_finished: bool
    ) -> int | None:
        if is_prewarm(req.rid):
            self.tree.warming = True
            return super().prepare_for_caching_req(req, insert_params, token_ids_len, is_finished)
        query: QueryFolds | None = getattr(req, QUERY_ATTRIBUTE, None)
        if query is None:
            query = self._admit(req, insert_params.prev_prefix_len)
            setattr(req, QUERY_ATTRIBUTE, query)
        self._inserting = query
        self._inserting_rid = req.rid
        self._hints.inserting(req, is_finished=is_finished)
        self.tree.transition = query.transition
        return super().prepare_for_caching_req(req, insert_params, token_ids_len, is_finished)

    def _admit(self, req: Req, cached_tokens: int) -> QueryFolds:
        """Counts one access per admitted request: upstream also counts inserts and waiting requests."""
        hits = self._hit_nodes(req, cached_tokens)
        observed = transition_after(self.tree.metadata(hits[-1]) if hits else None)
        serial = self.policy.admit()
        self.counters.calibration.advance(serial)
        transition = self._hints.admitted(req, cached_tokens, observed)
        query = QueryFolds(serial, transition)
        if self._recorder is not None:
            self._recorder.admitted(req, query.serial)
        for node in hits:
            metadata = self.tree.metadata(node)
            if metadata.doomed:
                self.counters.observed_lost_tokens += metadata.tokens
                metadata.doomed = False
            if metadata.is_prewarmed:
                self.counters.prewarmed_hit_tokens += metadata.tokens
                metadata.is_prewarmed = False
            self.tree.accessed(metadata, transition)
            self._record(EventKind.HIT, Tier.DEVICE, node, rid=req.rid)
        self.pins.admitted(hits)
        if self.gating is not None:
            self.gating.gate.tick()
        self.counters.admitted(req)
        return query

    def _hit_nodes(self, req: Req, cached_tokens: int) -> list[UnifiedTreeNode]:
        """Nodes that the request found in the cache, root side first."""
        if cached_tokens <= 0 or req.last_node is None:
            return []
        nodes = []
        node = self.tree_core.node_by_id(req.last_node)
        while node.parent is not None:
            metadata = self.tree.metadata(node)
            if metadata.depth + metadata.tokens <= cached_tokens:
                nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def commit_insert_component_data(
        self, node: UnifiedTreeNode, is_new_leaf: bool, *args: Any, **kwargs: Any
    ) -> None:
        super().commit_insert_component_data(node, is_new_leaf, *args, **kwargs)
        if is_new_leaf and self._inserting is not None:
            metadata = self.tree.metadata(node)
            metadata.importance.creator = self._inserting.serial
            self._hints.created(metadata)
        if is_new_leaf:
            if self.tree.metadata(node).importance.inherited_pages:  # no attention was seen of the others yet
                self.body_mass.update(node)
            self._record(EventKind.INSERT, Tier.DEVICE, node, rid=self._inserting_rid)

    def cleanup_after_caching_req(
        self,
        req: Req,
        is_finished: bool,
        insert_result: InsertResult | None = None,
        insert_params: InsertParams | None = None,
    ) -> None:
        super().cleanup_after_caching_req(req, is_finished, insert_result, insert_params)
        self._inserting = None
        self._inserting_rid = None
        self._hints.inserted()
        self.tree.transition = Transition.COLD
        self.tree.warming = False
        query: QueryFolds | None = getattr(req, QUERY_ATTRIBUTE, None)
        if query is None and not is_prewarm(req.rid):
            return
        self.pins.settle()
        # After an insert the path reaches further than the node that the request had locked.
        end = req.last_node
        if is_finished and insert_result is not None:
            end = insert_result.last_device_node
        path = self.tree.path_to(end)
        if query is None:
            self._warmed(path)
            return
        if is_finished:
            self._hints.retain(req)
        for node in path:
            self._computed_again(node, query, req.rid)
        if insert_params is not None and insert_params.chunked:
            return
        if path:
            self.tree.metadata(path[-1]).is_tip = True
        if is_finished:
            self._mark_generated(path, len(req.origin_input_ids), query.serial)
        self._hints.cached(req, path, is_finished=is_finished)
        learn = partial(self._learn, req, query, end, req.kv.req_pool_idx, is_finished=is_finished)
        self.after_answers.do(learn)

    def _learn(
        self, req: Req, query: QueryFolds, end: NodeId | None, slot: int | None, *, is_finished: bool
    ) -> None:
        """Takes in what a request said about its path, which ends with the node ``end``."""
        start = time.perf_counter()
        # Nodes may have been cut since the request left them, by another request of the same pass.
        path = self.tree.path_to(end)
        if self._folding.fold(req, query, path, slot, is_finished=is_finished):
            for node in path:
                self.body_mass.update(node)
        self.pins.folded(path)
        if is_finished and self.gating is not None:
            self.gating.offer_again(path)
        if is_finished and self._recorder is not None:
            self._recorder.finished(req, self.policy.clock)
        if is_finished and self.ledger is not None:
            self.ledger.visited(req, path)
        for node in path:
            self.refresh(node)
        if is_finished:
            self.policy.settle()
        self.counters.fold_seconds += time.perf_counter() - start
        if is_finished:
            self.publish()

    def publish(self) -> None:
        """Exports what was counted so far, where anything is exported."""
        if self._metrics is not None:
            self._metrics.publish(self)

    def _warmed(self, path: list[UnifiedTreeNode]) -> None:
        """A pre-warm may have computed what only lower tiers held, too; nobody asked for it."""
        for node in path:
            metadata = self.tree.metadata(node)
            if metadata.off_device and not node.evicted:
                metadata.off_device = False
                metadata.is_prewarmed = True
                self.body_mass.update(node)
            self.refresh(node)

    def _computed_again(self, node: UnifiedTreeNode, query: QueryFolds, rid: str) -> None:
        """Upstream puts a request's own KV into a node that only lower tiers held and that was not loaded."""
        metadata = self.tree.metadata(node)
        if not metadata.off_device or node.evicted:
            return
        metadata.off_device = False
        self.body_mass.update(node)
        self.tree.accessed(metadata, query.transition)
        self.refresh(node)
        self._record(EventKind.INSERT, Tier.DEVICE, node, rid=rid)

    def _mark_generated(self, path: list[UnifiedTreeNode], prompt_tokens: int, serial: int) -> None:
        # Upstream splits a finished request at the page that holds the prompt's end.
        boundary = prompt_tokens // self.tree.page_size * self.tree.page_size
        for node in reversed(path):
            metadata = self.tree.metadata(node)
            if metadata.depth < boundary or metadata.importance.creator != serial:
                break
            self.policy.holds(metadata, BlockType.GENERATED)

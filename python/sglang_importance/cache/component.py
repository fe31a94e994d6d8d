"""The tree component: upstream's own, which also hands every event to our parts.

Exceptions of upstream's code are never caught; our code runs under ``Faults``. Once learning has failed,
upstream decides alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, InsertResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.unified_cache.components import CacheTransferPhase, FullComponent
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, UnifiedTreeNode
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sgl_importance.metrics_table import FaultPlace
from sgl_importance.misses.reason import Cause
from sgl_importance.reuse.reuse_class import Transition
from sgl_importance.tiers import Tier
from sglang_importance.attention.rows import ScoreRows
from sglang_importance.cache.dense_prefix import DensePrefix
from sglang_importance.cache.misses import Misses
from sglang_importance.cache.node_events import NodeEvents
from sglang_importance.cache.request_flow import RequestFlow
from sglang_importance.cache.tail_cuts import TailCuts
from sglang_importance.observe.recorder import Recorder
from sglang_importance.observe.shadowing import Shadowing
from sglang_importance.placement.backup_filter import BackupFilter
from sglang_importance.placement.ledger_feed import LedgerFeed
from sglang_importance.placement.pinning import Pinning
from sglang_importance.placement.prewarm_request import is_prewarm
from sglang_importance.placement.storage_writes import is_stored_already
from sglang_importance.storage.served_chain import SERVED
from sglang_importance.tree.body_mass import BodyMassBook
from sglang_importance.tree.chosen_order import ChosenOrder
from sglang_importance.tree.deferred_work import DeferredWork
from sglang_importance.tree.eviction import EvictionOrder, MarginalLossOrder, RankedLeaves, StockOrder
from sglang_importance.tree.folding import Folding
from sglang_importance.tree.insertion import Insertion
from sglang_importance.tree.recency_order import RecencyOrder
from sglang_importance.tree.state import TreeState
from sglang_importance.upstream.differences import is_chunk
from sglang_importance.upstream.nodes import NodeId

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer

INSERTION_ATTRIBUTE = "importance_insertion"


class ImportanceComponent(FullComponent):
    """Puts the parts together that follow one tree, and hands them upstream's events.

    Args:
        state: of the tree; ``observe`` keeps upstream's victims.
        rows: the score rows; None where no attention backend emits.
        recorder: records tree events; None records nothing.
        shadowing: follows every request under ``observe``; None compares one eviction ahead only.
        publish: exports the counts so far; called after each request. None exports nothing.
        dense_prefix: says how much of a request may enter the tree; None for all of it.
        misses: accounts for what was not found; None keeps no account.

    Attributes:
        preempted: requests that lost their room in the scheduler's pass under way.
        wanted_tokens: of the device, that the eviction under way has to free.
    """

    tree_core: UnifiedTreeCore  # which sglang sets before it calls any method of a component

    def __init__(
        self,
        cache: UnifiedRadixCache,
        params: CacheInitParams,
        *,
        state: TreeState,
        rows: ScoreRows | None = None,
        recorder: Recorder | None = None,
        shadowing: Shadowing | None = None,
        publish: Callable[[], None] | None = None,
        dense_prefix: DensePrefix | None = None,
        misses: Misses | None = None,
    ) -> None:
        super().__init__(cache, params)  # type: ignore[no-untyped-call]  # upstream's has no annotations
        self.state = state
        self.deferred_work = DeferredWork()
        decides = state.options.policy == "importance"
        recency = None if decides else {Tier.DEVICE: RecencyOrder(), Tier.HOST: RecencyOrder()}
        self.leaves = RankedLeaves(state, recency)
        self.body_mass = BodyMassBook(state.tree)
        self.pins = Pinning(state, cache, self.leaves.refresh)
        self.backups: BackupFilter | None = None
        self.dense_prefix = dense_prefix
        self.misses = misses
        self.preempted: list[Req] = []
        self.order: EvictionOrder = (
            MarginalLossOrder(state, self.leaves) if recency is None else StockOrder(recency)
        )
        self.node_events = NodeEvents(
            state, self.leaves, self.order, self.body_mass, self.pins, recorder, misses
        )
        self.requests = RequestFlow(
            state,
            self.leaves,
            self.node_events,
            self.body_mass,
            self.pins,
            Folding(state, rows, recorder),
            recorder=recorder,
            shadowing=shadowing,
            misses=misses,
        )
        if state.options.store.tiers and state.options.policy == "importance":
            SERVED.predict_by(state.policy.reuse)
            self.requests.storage_tiers = SERVED
        self._tails = TailCuts(state, self.node_events)
        self._cuts_tails = decides
        self.wanted_tokens = 0
        self._faults = state.faults
        self._recorder = recorder
        self._shadowing = shadowing
        self._publish = publish
        self._stock_walks = False
        self._brought: Insertion | None = None
        if misses is not None:
            self._faults.on_fallback.append(misses.close)
        if rows is not None:
            self._faults.on_fallback.append(rows.close)

    @property
    def ledger(self) -> LedgerFeed | None:
        """Takes the finished requests, for the ledger."""
        return self.requests.ledger

    def attach_ledger(self, ledger: LedgerFeed) -> None:
        self.requests.ledger = ledger
        self.pins.keeper = ledger
        self.node_events.on_cut.append(ledger.cut)
        self._faults.on_fallback.append(ledger.abandon)

    def publish(self) -> None:
        """Exports the counts so far, where a publisher is set."""
        if self._publish is not None:
            self._faults.beside(FaultPlace.METRICS, self._publish)

    def watch_tree(self) -> None:
        """Follows a tree core that has just been reset."""
        self._faults.learn(FaultPlace.TREE_EVENT, self._watch_tree)

    def _watch_tree(self) -> None:
        self.state.policy.reset()
        self.state.tree.watch(self.tree_core)
        self.body_mass.clear()
        self.state.counters.calibration.clear()
        self.pins.reset()
        self.state.events.reset()
        if self.misses is not None:
            self.misses.reset()
        self.requests.sessions.reset()
        if self.requests.answer_ends is not None:
            self.requests.answer_ends.reset()
        if self._recorder is not None:
            self._faults.beside(FaultPlace.RECORDING, self._recorder.reset, self.state.policy.clock)
        if self._shadowing is not None:
            self._faults.beside(FaultPlace.OBSERVATION, self._shadowing.reset)
        self.leaves.watch(self.tree_core)

    def observation(self) -> dict[str, Any] | None:
        """``observe`` only: results that importance would have had on the traffic so far."""
        if self._shadowing is None:
            return None
        return self._shadowing.document()

    # ---- requests ----

    def prepare_for_caching_req(
        self, req: Req, insert_params: InsertParams, token_ids_len: int, is_finished: bool
    ) -> int | None:
        insertion = self._inserting(req, insert_params.prev_prefix_len, is_finished=is_finished)
        setattr(insert_params, INSERTION_ATTRIBUTE, insertion)
        tokens = super().prepare_for_caching_req(req, insert_params, token_ids_len, is_finished)
        if self.dense_prefix is None:
            return tokens
        assert tokens is None, "upstream limits what a full-attention component may cache"
        return min(token_ids_len, self.dense_prefix.insertable(req, insert_params.prev_prefix_len))

    def _inserting(self, req: Req, found: int, *, is_finished: bool) -> Insertion | None:
        insertion = self._faults.learn(
            FaultPlace.ADMISSION, self.requests.inserting, req, found, is_finished=is_finished
        )
        if not self._faults.is_learning:
            self._faults.beside(FaultPlace.METRICS, self.requests.admissions.count, req, found)
        return insertion

    def commit_insert_component_data(
        self, node: UnifiedTreeNode, is_new_leaf: bool, params: InsertParams, *args: Any, **kwargs: Any
    ) -> None:
        super().commit_insert_component_data(node, is_new_leaf, params, *args, **kwargs)
        if is_new_leaf:
            insertion = getattr(params, INSERTION_ATTRIBUTE, None) or self._brought
            self._faults.learn(
                FaultPlace.TREE_EVENT, self._came_in, node, insertion or Insertion(Transition.COLD)
            )

    def _came_in(self, node: UnifiedTreeNode, insertion: Insertion) -> None:
        self.requests.inserted(node, insertion)
        if is_stored_already(self.cache, node):
            self.node_events.handed_to_storage(node)

    def cleanup_after_caching_req(
        self,
        req: Req,
        is_finished: bool,
        insert_result: InsertResult | None = None,
        insert_params: InsertParams | None = None,
    ) -> None:
        super().cleanup_after_caching_req(req, is_finished, insert_result, insert_params)
        if req.skip_radix_cache_insert and insert_result is None:
            # The first that the cache hears of a beam search, which found what is there as any request does.
            self._inserting(req, req.kv.cache_protected_len, is_finished=is_finished)
        # After an insert the path reaches further than the node that the request had locked.
        end = req.last_node
        if is_finished and insert_result is not None:
            end = insert_result.last_device_node
        learn = self._faults.learn(
            FaultPlace.ADMISSION,
            self.requests.cached,
            req,
            end,
            is_finished=is_finished,
            is_chunk=is_chunk(req, insert_params),
        )
        if (
            is_finished
            and self.misses is not None
            and (insert_result is None or self.dense_prefix is not None)
        ):
            self._not_kept(req, is_inserted=insert_result is not None)
        if learn is not None:
            self.deferred_work.do(partial(self._faults.learn, FaultPlace.LEARNING, learn))
        if is_finished:
            self.deferred_work.do(self.publish)

    def _not_kept(self, req: Req, *, is_inserted: bool) -> None:
        """A request has left, and the tree does not hold all that it had computed."""
        if self.misses is not None:
            self.misses.given_up(req, Cause.SELECTOR if is_inserted else _why_not_inserted(req))

    def gave_up_waiting(self, rid: str) -> None:
        """A request was aborted in the queue, where it may be for a second time, after a retraction."""
        if self._shadowing is not None:
            self._faults.beside(FaultPlace.OBSERVATION, self._shadowing.gone, rid)

    # ---- nodes ----

    def prefetched(self, rid: str) -> None:
        """The storage tier's part of a request is in host memory."""
        self._faults.learn(FaultPlace.TREE_EVENT, self.node_events.prefetched, _from_storage(rid))

    @contextmanager
    def bringing_from_storage(self, rid: str) -> Iterator[None]:
        """While it is entered, upstream puts what storage had for a request into the tree by itself."""
        self._brought = _from_storage(rid)
        try:
            yield
        finally:
            self._brought = None

    def redistribute_on_node_split(self, new_parent: UnifiedTreeNode, child: UnifiedTreeNode) -> None:
        super().redistribute_on_node_split(new_parent, child)
        self._faults.learn(FaultPlace.TREE_EVENT, self.node_events.split, new_parent, child)

    def discard_deleted_session_leaf(self, node: UnifiedTreeNode) -> None:
        # Upstream calls this for every node that leaves the tree, while its parent is still linked.
        super().discard_deleted_session_leaf(node)
        self._faults.learn(FaultPlace.TREE_EVENT, self.node_events.removed, node)

    def commit_hicache_transfer(
        self,
        node: UnifiedTreeNode,
        phase: CacheTransferPhase,
        transfers: list[PoolTransfer] = (),  # type: ignore[assignment]  # upstream's own default
        **kwargs: Any,
    ) -> None:
        super().commit_hicache_transfer(node, phase, transfers, **kwargs)
        self._faults.learn(FaultPlace.TREE_EVENT, self.node_events.transferred, node, phase, transfers)

    def evict_component(self, node: UnifiedTreeNode, *args: Any, **kwargs: Any) -> tuple[int, int]:
        device_tokens, host_tokens = super().evict_component(node, *args, **kwargs)
        self._faults.learn(FaultPlace.TREE_EVENT, self.node_events.evicted, node, device_tokens, host_tokens)
        return device_tokens, host_tokens

    # ---- eviction ----

    def _evict_device_start(self, request_cnt: int) -> None:
        self._evict_device_request_cnt = request_cnt
        self._stock_walks = False
        if not self._faults.is_learning:
            self._start_stock_walk()
        self._faults.learn(FaultPlace.RANKING, self.order.begin)

    def _start_stock_walk(self) -> None:
        super()._evict_device_start(self._evict_device_request_cnt)
        self._stock_walks = True

    def _evict_device_next_node(self, tracker: Any, *collected: Any, **named: Any) -> NodeId | None:
        if self._faults.is_learning:
            if tracker[self.component_type] >= self._evict_device_request_cnt:
                return None
            victim = self._faults.learn(FaultPlace.RANKING, self.order.device_victim)
            if self._faults.is_learning:
                if victim is not None and self._cuts_tails:
                    asked = self.wanted_tokens - tracker[self.component_type]
                    self._tails.cut(self.tree_core.node_by_id(victim), asked)
                return victim
        if not self._stock_walks:  # a fault in the midst of a walk: it goes on in upstream's order
            self._start_stock_walk()
        return super()._evict_device_next_node(tracker, *collected, **named)

    def _evict_device_end(self) -> None:
        super()._evict_device_end()
        self._faults.learn(FaultPlace.RANKING, self.order.end)

    def drive_host_eviction(self, num_tokens: int, tracker: Any, *collected: Any, **named: Any) -> None:
        # Also runs inside a device walk, to make room for the backup of its victim.
        with self.order.deciding():
            while self._faults.is_learning and tracker[self.component_type] < num_tokens:
                node = self._faults.learn(FaultPlace.RANKING, self._host_victim)
                if node is not None:
                    if self._cuts_tails:
                        self._tails.cut(node, num_tokens - tracker[self.component_type])
                    self.tree_core._evict_host_leaf(node, tracker, *collected, **named)
                elif self._faults.is_learning:
                    return
        if not self._faults.is_learning:
            super().drive_host_eviction(num_tokens, tracker, *collected, **named)

    def _host_victim(self) -> UnifiedTreeNode | None:
        node_id = self.order.host_victim()
        return None if node_id is None else self.tree_core.node_by_id(node_id)

    @contextmanager
    def evicting_only(self, nodes: Sequence[UnifiedTreeNode]) -> Iterator[None]:
        """While walks over device and host take these nodes only, those behind before those in front."""
        order, self.order = self.order, ChosenOrder(self.state, self.leaves, nodes)
        cuts_tails, self._cuts_tails = self._cuts_tails, False
        try:
            with order.deciding():
                yield
        finally:
            self.order, self._cuts_tails = order, cuts_tails

    def check_integrity(self) -> None:
        """Asserts that orders, leaf sets and facts agree with the tree, while this server learns."""
        if not self._faults.is_learning:
            return
        self.leaves.check_integrity()
        self.state.tree.check_integrity()
        self.body_mass.check_integrity()
        self.pins.check_integrity()
        if self.misses is not None:
            self.misses.check_integrity(self.state.tree.nodes())


def _why_not_inserted(req: Req) -> Cause:
    if not req.finished():
        return Cause.RETRACTION if req.to_finish is None else Cause.ABORT
    assert req.finished_reason is not None
    is_aborted = req.finished_reason.to_json()["type"] == "abort"
    return Cause.BEAMS if req.skip_radix_cache_insert and not is_aborted else Cause.ABORT


def _from_storage(rid: str) -> Insertion:
    """The insertion of what storage had for a request."""
    return Insertion(None if is_prewarm(rid) else Transition.COLD, is_from_storage=True)

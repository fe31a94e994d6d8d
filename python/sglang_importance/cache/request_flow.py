"""Follows a request from its admission to its end, and updates the nodes of its path."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sgl_importance.metrics_table import FaultPlace
from sgl_importance.nodes.ages import NOWHERE
from sgl_importance.nodes.named_sessions import SessionName
from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.observe.trace.arrivals import HEALTH_CHECK_PREFIX
from sgl_importance.observe.trace.records import EventKind
from sgl_importance.observe.volatile.detector import VolatileBeginnings
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance.reuse.turns import Turn
from sgl_importance.signal.fold import QueryFolds
from sgl_importance.tiers import Tier
from sglang_importance.cache.admissions import Admissions
from sglang_importance.cache.misses import Misses
from sglang_importance.cache.node_events import NodeEvents
from sglang_importance.cache.resident_ages import ResidentAges
from sglang_importance.observe.recorder import Recorder
from sglang_importance.observe.shadowing import Shadowing
from sglang_importance.placement.answer_ends import AnswerEnds
from sglang_importance.placement.hint_follower import HintFollower
from sglang_importance.placement.ledger_feed import LedgerFeed
from sglang_importance.placement.pinning import Pinning
from sglang_importance.placement.prewarm_request import is_prewarm
from sglang_importance.placement.session_follower import SessionFollower
from sglang_importance.storage.served_chain import ServedChain
from sglang_importance.tree.body_mass import BodyMassBook
from sglang_importance.tree.eviction import RankedLeaves
from sglang_importance.tree.folding import Folding
from sglang_importance.tree.insertion import Insertion
from sglang_importance.tree.state import TreeState
from sglang_importance.upstream.nodes import NodeId
from sglang_importance.upstream.request_record import found_tokens, namespace_of, record_of


class RequestFlow:
    """Accesses, folds, pins, hints and the ledger, as requests come and go.

    A running request locks its path, so nothing is folded while it decodes: its page scores are folded
    at prefill end and at finish, retraction or abort, after the answers of the same pass.

    Attributes:
        ledger: takes finished requests, for the ledger's file; None where there is none.
        storage_tiers: takes finished requests, to rank stored pages by; None without a chain of tiers.
        beginnings: takes finished prompts, to find text that changes; None on a rank that only follows.
        admissions: takes requests in, each once.
        sessions: closes them.
        answer_ends: tells how an answer ended; None where the server parses no calls of tools: then only
            hints say so.
    """

    def __init__(
        self,
        state: TreeState,
        leaves: RankedLeaves,
        node_events: NodeEvents,
        body_mass: BodyMassBook,
        pins: Pinning,
        folding: Folding,
        *,
        recorder: Recorder | None,
        shadowing: Shadowing | None,
        misses: Misses | None = None,
    ) -> None:
        self.ledger: LedgerFeed | None = None
        self.answer_ends: AnswerEnds | None = None
        self.storage_tiers: ServedChain | None = None
        self.beginnings: VolatileBeginnings | None = None
        self._state = state
        self._leaves = leaves
        self._node_events = node_events
        self._body_mass = body_mass
        self._pins = pins
        self._folding = folding
        self._recorder = recorder
        self._shadowing = shadowing
        self._hints = HintFollower(state, pins)
        if misses is not None:
            self._hints.settle_misses = misses.settle
        self._resident_ages = ResidentAges(state)
        self.sessions = SessionFollower(state, pins, leaves.refresh)
        self.sessions.on_over = self._session_over
        self.admissions = Admissions(
            state,
            node_events,
            pins,
            self._hints,
            self.sessions,
            recorder=recorder,
            shadowing=shadowing,
            misses=misses,
        )

    # ---- insertion ----

    def inserting(self, req: Req, cached_tokens: int, *, is_finished: bool) -> Insertion | None:
        """The request's tokens are about to enter the tree; the first time, it has just been admitted.

        None of one that nobody asked and nothing is learnt from: sglang's own health checks.

        Args:
            cached_tokens: of its prompt, that it found on the device.
        """
        if is_prewarm(req.rid):
            return Insertion(transition=None)
        if req.rid.startswith(HEALTH_CHECK_PREFIX):  # a probe of an idle server would age all that it holds
            return None
        record = record_of(req)
        if record.query is None:
            record.query = self.admissions.admit(req, cached_tokens)
        return self._hints.inserting(req, record.query, is_finished=is_finished)

    def inserted(self, node: UnifiedTreeNode, insertion: Insertion) -> None:
        """The insertion made a new leaf."""
        metadata = self._node_events.taken_in(node, insertion)
        metadata.importance.creator = insertion.serial
        if insertion.hinted is not None:
            insertion.hinted.created(metadata)
        if metadata.importance.inherited_pages:  # no attention was seen of the others yet
            self._body_mass.update(node)
        if insertion.is_from_storage:
            self._node_events.loaded_from_storage(node)
            return
        reason = "prewarmed" if insertion.is_prewarm else "computed"
        self._node_events.record(EventKind.INSERT, Tier.DEVICE, node, reason, rid=insertion.rid)

    # ---- what follows ----

    def cached(
        self, req: Req, end: NodeId | None, *, is_finished: bool, is_chunk: bool
    ) -> Callable[[], None] | None:
        """The request's tokens are in the tree, or given up, down to the node ``end``.

        Args:
            is_chunk: whether more of the prompt is to come.

        Returns:
            The deferred learning from the request: for after its answer, and before its slot goes to another
            one. None where there is nothing to learn.
        """
        answer_end = self._answer_end(req) if is_finished else AnswerEnd.UNKNOWN
        query = record_of(req).query
        if query is None and not is_prewarm(req.rid):
            return None
        if is_finished and self._shadowing is not None:
            self._state.faults.beside(FaultPlace.OBSERVATION, self._shadowing.finished, req, answer_end)
        self._pins.settle()
        path = self._state.tree.path_to(end)
        if query is None:
            self._warmed(path)
            return None
        if is_finished:
            self._hints.retain(req)  # which cuts no node before the answer is out
        for node in path:
            self._computed_again(node, query, req.rid)
            self._computed_beside(node, query)
        if is_chunk:
            return None
        self.sessions.visited(req, path)
        tree = self._state.tree
        nodes = [tree.metadata(node) for node in path]
        tree.tracker.ended(
            nodes,
            serial=query.serial,
            prompt_tokens=len(req.origin_input_ids),
            is_finished=is_finished,
        )
        if is_finished and req.finished():
            turn = self._answered(req, query, end, nodes, answer_end)
            self.sessions.answered(req, path, turn)
        self._hints.cached(req, path, is_finished=is_finished)
        return partial(self._learn, req, query, end, req.kv.req_pool_idx, answer_end, is_finished=is_finished)

    def _answered(
        self,
        req: Req,
        query: QueryFolds,
        end: NodeId | None,
        nodes: Sequence[NodeMetadata],
        answer_end: AnswerEnd,
    ) -> Turn | None:
        """The answer of a request that brought or visited these nodes has ended; its turn, if it has one."""
        tree, clock = self._state.tree, self._state.policy.clock
        tree.tracker.answered(nodes, answer_end)
        turn = tree.turns.finished(
            nodes,
            serial=query.serial,
            clock=clock,
            prompt_tokens=len(req.origin_input_ids),
            output_tokens=len(req.output_ids_through_stop),
            answer_end=answer_end,
        )
        if answer_end is AnswerEnd.UNKNOWN and self.answer_ends is not None:
            self.answer_ends.await_end(req.rid, end, clock, turn)
        return turn

    def told(self, rid: str, answer_end: AnswerEnd) -> None:
        """The HTTP process has parsed the answer of a finished request: shadows and recording hear it too."""
        if self.answer_ends is None or not self.answer_ends.told(rid, answer_end):
            return
        state = self._state
        if self._shadowing is not None:
            state.faults.beside(FaultPlace.OBSERVATION, self._shadowing.told, rid, answer_end)
        if self._recorder is not None:
            clock = state.policy.clock
            state.faults.beside(FaultPlace.RECORDING, self._recorder.told, rid, clock, answer_end)

    def _session_over(self, name: SessionName) -> None:
        if self._shadowing is not None:
            self._state.faults.beside(FaultPlace.OBSERVATION, self._shadowing.session_over, name)

    def _answer_end(self, req: Req) -> AnswerEnd:
        """How the answer ended; UNKNOWN of a request that was only retracted."""
        if not req.finished():
            return AnswerEnd.UNKNOWN
        recognised = AnswerEnd.UNKNOWN if self.answer_ends is None else self.answer_ends.of(req)
        return self._hints.answer_end(req, recognised)

    def _learn(
        self,
        req: Req,
        query: QueryFolds,
        end: NodeId | None,
        slot: int | None,
        answer_end: AnswerEnd,
        *,
        is_finished: bool,
    ) -> None:
        """Takes in the scores and hints of a request for its path, which ends with the node ``end``."""
        state = self._state
        start = time.perf_counter()
        self._pins.settle()  # of the prompt that the request retains
        # Nodes may have been cut since the request left them, also by another request of the same pass.
        path = state.tree.path_to(end)
        if self._folding.fold(req, query, path, slot, is_finished=is_finished):
            for node in path:
                self._body_mass.update(node)
        if is_finished and self._recorder is not None:
            state.faults.beside(
                FaultPlace.RECORDING, self._recorder.finished, req, state.policy.clock, answer_end
            )
        if is_finished and self.ledger is not None:
            state.faults.beside(FaultPlace.RECORDING, self.ledger.visited, req, path)
        if req.finished() and self.beginnings is not None:
            state.faults.beside(FaultPlace.OBSERVATION, self._compare_beginning, self.beginnings, req)
        if is_finished and self.storage_tiers is not None:
            for node in path:
                metadata = state.tree.metadata(node)
                self.storage_tiers.visited(node.hash_value or (), metadata.reuse_class, metadata.last_access)
        if is_finished:
            self._resident_ages.go_on()
        for node in path:
            self._leaves.refresh(node)
        state.counters.fold_seconds += time.perf_counter() - start

    def _compare_beginning(self, beginnings: VolatileBeginnings, req: Req) -> None:
        found = sum(found_tokens(req).values())
        beginnings.seen(namespace_of(req), req.origin_input_ids, found)
        self._state.counters.volatile_lost_tokens = beginnings.lost_tokens

    def _warmed(self, path: list[UnifiedTreeNode]) -> None:
        """A pre-warm may also have computed nodes that only lower tiers held; it counts as no visit."""
        for node in path:
            metadata = self._state.tree.metadata(node)
            if metadata.off_device and not node.evicted:
                metadata.off_device = False
                metadata.is_prewarmed = True
                self._body_mass.update(node)
            self._leaves.refresh(node)

    def _computed_beside(self, node: UnifiedTreeNode, query: QueryFolds) -> None:
        """A request that was to be dropped after use brought the node, while this one computed the same."""
        metadata = self._state.tree.metadata(node)
        if metadata.expendable and metadata.importance.creator != query.serial:
            metadata.expendable = False
            self._leaves.refresh(node)

    def _computed_again(self, node: UnifiedTreeNode, query: QueryFolds, rid: str) -> None:
        """Upstream puts a request's own KV into a node that only lower tiers held and that was not loaded."""
        metadata = self._state.tree.metadata(node)
        if not metadata.off_device or node.evicted:
            return
        metadata.off_device = False
        self._body_mass.update(node)
        self._state.counters.ages.asked_again(NOWHERE, metadata.tokens, metadata.last_access)
        self._state.tree.accessed(metadata, query.transition)
        self._leaves.refresh(node)
        self._node_events.record(EventKind.INSERT, Tier.DEVICE, node, "computed", rid=rid)

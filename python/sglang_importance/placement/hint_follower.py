"""Follows the hints of requests in the scheduler."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.kv_hints import KvHintsEnvelope
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sgl_importance.metrics_table import FaultPlace
from sgl_importance.nodes.digests import chain_digests, root_digest
from sgl_importance.nodes.named_sessions import owner
from sgl_importance.placement.hints.hinted_request import HintedRequest
from sgl_importance.placement.hints.hints import BadHint, Hints
from sgl_importance.placement.hints.shared_actions import DEMOTE, DEREF
from sgl_importance.placement.pins.pin import Pin
from sgl_importance.placement.pins.pin_room import PinRefused
from sgl_importance.placement.pins.retained_pins import SPENT, not_retained, pin_of, retained, superseded
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance.reuse.reuse_class import Transition
from sgl_importance.signal.fold import QueryFolds
from sgl_importance.tiers import Tier
from sglang_importance.placement.pinning import Pinning
from sglang_importance.tree.faults import Faults
from sglang_importance.tree.insertion import Insertion
from sglang_importance.tree.state import TreeState
from sglang_importance.upstream.request_record import RequestRecord, record_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GuardedReport:
    """The report of one request. A fault in it is counted, and ends nothing.

    Attributes:
        record: of the request, with its account once that is made.
        settle: waits until it is.
    """

    hinted: HintedRequest
    record: RequestRecord
    settle: Callable[[], None]
    faults: Faults

    def make(self, hit_tokens: Mapping[Tier, int]) -> dict[str, Any] | None:
        """By the tokens that the request found in each tier; None where that failed."""
        return self.faults.beside(FaultPlace.REPORT, self._make, hit_tokens)

    def _make(self, hit_tokens: Mapping[Tier, int]) -> dict[str, Any]:
        self.settle()
        self.hinted.misses = self.record.misses
        return self.hinted.report(hit_tokens)


class HintFollower:
    """Follows the hints of each request from its admission to its end; under ``observe`` they move nothing.

    Args:
        state: its nodes are labelled, its ghosts give the lost pages.
        pins: hold what requests retain.
    """

    def __init__(self, state: TreeState, pins: Pinning) -> None:
        self._state = state
        self._tree = state.tree
        self._policy = state.policy
        self._pins = pins
        self.settle_misses: Callable[[], None] = lambda: None
        """Waits until the accounts of all requests so far are made."""

    def admitted(self, req: Req, cached_tokens: int, transition: Transition) -> Transition:
        """Reads the hints of a request; returns its transition."""
        hints = hints_of(req)
        self._count_shared_actions(req, hints)
        if hints is None:
            return transition
        hinted = HintedRequest(
            hints,
            prompt_tokens=len(req.origin_input_ids),
            cached_tokens=cached_tokens,
            clock=self._policy.clock,
            observe=self._state.options.policy == "observe",
            has_selector=self._state.options.is_sparse,
            has_session=record_of(req).session is not None,
        )
        record = record_of(req)
        record.hinted = hinted
        if hints.report:
            faults = self._state.faults
            record.make_report = GuardedReport(hinted, record, self.settle_misses, faults).make
        return hinted.transition(transition)

    def _count_shared_actions(self, req: Req, hints: Hints | None) -> None:
        envelope: KvHintsEnvelope | None = getattr(req, "kv_hints", None)
        if envelope is None:
            return
        for name, is_followed in (hints or Hints()).followed(envelope.actions):
            has_effect = is_followed
            if name == DEREF:
                has_effect &= record_of(req).session is not None
            elif name == DEMOTE:
                has_effect &= self._tree.core.enable_hicache
            self._state.counters.hint_actions[name, "followed" if has_effect else "ignored"] += 1

    def inserting(self, req: Req, query: QueryFolds, *, is_finished: bool) -> Insertion:
        """The request's tokens are about to enter the tree."""
        hinted = record_of(req).hinted
        brings_prompt = not is_finished or len(req.output_ids) <= 1
        reports = hinted is not None and hinted.hints.report and brings_prompt
        lost = hinted.lost if hinted is not None and reports else None
        session = record_of(req).session
        return Insertion(query.transition, req.rid, query.serial, hinted, session, lost)

    def retain(self, req: Req) -> None:
        """The request ended, its tokens are in the tree: pins its prompt where it asked for that.

        The answer needs what is granted; the nodes are cut and ranked behind it, with ``Pinning.settle``.
        """
        hinted = record_of(req).hinted
        if hinted is None or not hinted.retains or not req.finished():
            return
        if self._tree.has_paired_keys:
            hinted.outcome["retain"] = not_retained("pins are not kept beside EAGLE")
            return
        wanted = hinted.hints.retain
        assert wanted is not None
        limit = min(self._pins.retainable_tokens(), wanted.tokens or len(req.origin_input_ids))
        prompt = array("q", req.origin_input_ids[:limit])
        digests = chain_digests(root_digest(req.extra_key, req.cache_salt), prompt, self._tree.page_size)
        if not digests:
            hinted.outcome["retain"] = not_retained("the prompt fills no page" if limit else SPENT)
            return
        pin = pin_of(
            prompt,
            digests,
            extra_key=req.extra_key,
            cache_salt=req.cache_salt,
            expires_at=self._pins.now() + wanted.ttl_seconds,
            page_size=self._tree.page_size,
            session=record_of(req).session,
        )
        hinted.outcome["retain"] = self._retain(pin)

    def _retain(self, pin: Pin) -> dict[str, Any]:
        table = self._pins.table
        needless = superseded(table.holders(pin.digests[0]), pin)
        held = table.get(pin.pin_id)
        for asked_before in {*needless, pin.pin_id}:
            if (other := table.get(asked_before)) is not None:
                pin.session = owner(other.session, pin.session)
        if held is not None and held.pin_id not in needless:  # it is held for longer
            held.session = pin.session
            return retained(held, self._tree.page_size)
        try:
            made_room = self._pins.retain(pin, needless)
        except PinRefused as refused:
            return not_retained(str(refused))
        return retained(pin, self._tree.page_size, made_room)

    def answer_end(self, req: Req, recognised: AnswerEnd) -> AnswerEnd:
        """How the answer of a finished request is taken to have ended."""
        hinted = record_of(req).hinted
        return recognised if hinted is None else hinted.answer_end(recognised)

    def cached(self, req: Req, path: Sequence[UnifiedTreeNode], *, is_finished: bool) -> None:
        """The request's tokens are in the tree, root side first; a last page that is not full is not."""
        hinted = record_of(req).hinted
        if hinted is None:
            return
        nodes = [self._tree.metadata(node) for node in path]
        hinted.label(nodes, self._tree.tracker)
        if is_finished:
            hinted.ended(nodes, finished=req.finished())
            if req.finished():
                has_host = self._tree.core.enable_hicache
                hinted.demote(nodes, record_of(req).session, has_host=has_host)


def hints_of(req: Req) -> Hints | None:
    """The hints of a request, read once; None where it says nothing that can be followed."""
    record = record_of(req)
    if not record.has_read_hints:
        record.has_read_hints = True
        record.hints = _read_hints(req)
    return record.hints


def _read_hints(req: Req) -> Hints | None:
    envelope: KvHintsEnvelope | None = getattr(req, "kv_hints", None)
    if envelope is None:
        return None
    try:
        hints = Hints.of_actions(envelope.actions)
    except BadHint as error:
        # The HTTP process refuses such a request: this one came another way, and must not end the server.
        logger.warning("KV importance: hints ignored: %s", error)
        return None
    return hints if hints.model_fields_set else None

"""Hands what happens in a scheduler to the trace writer, in the form of the recording."""

from __future__ import annotations

import atexit
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sgl_importance.observe.trace.reader import check_continues
from sgl_importance.observe.trace.recorded_options import recorded_options
from sgl_importance.observe.trace.records import (
    FORMAT_VERSION,
    SCHEMA,
    AnswerTold,
    Detail,
    EventKind,
    Fold,
    Header,
    PageLists,
    RequestAdmitted,
    RequestFinished,
    Step,
    TreeEvent,
)
from sgl_importance.observe.trace.writer import NO_PAGES, TraceWriter
from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.reuse.answer_end import MAX_AWAITED, AnswerEnd
from sgl_importance.signal.fold import Observation
from sgl_importance.tiers import Tier
from sglang_importance.observe.observed_pages import ObservedPages
from sglang_importance.observe.request_tokens import prompt_and_output_of, prompt_of
from sglang_importance.upstream.nodes import key_of

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

DIGEST = "xxh3-128, chained by page, sgl_importance.nodes.digests.chain_digests"
MAX_OPEN_REQUESTS = 1 << 16  # requests that are aborted before their admission never end for us


class Recorder:
    """Everything the scheduler's thread tells the recording. Changes nothing of what it is shown.

    Args:
        directory: of the recording.
        options: what the operator chose.
        page_size: tokens per page.
        model: name of the served model.
        layers: attention layers that emit; empty where not known.
        device_tokens: size of the device tier.
        cost: of the policy.
        flags: of sglang's that shadow caches ask for, by name.

    Attributes:
        host_tokens: says the size of the host tier, which sglang makes later; 0 where there is none.

    Raises:
        OSError: the directory cannot be written.
        TraceError: it has a recording of another model, or of other pages.
    """

    def __init__(
        self,
        directory: Path,
        options: ImportanceOptions,
        *,
        page_size: int,
        model: str,
        layers: Sequence[int],
        device_tokens: int,
        cost: CostModel,
        flags: Mapping[str, Any] | None = None,
    ) -> None:
        self.host_tokens: Callable[[], int] | None = None
        self.wants_steps = options.trace.detail == Detail.STEPS.value
        self._start = time.perf_counter()
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._next_number = 0
        self._awaited: OrderedDict[str, int] = OrderedDict()
        self._header = Header(
            version=FORMAT_VERSION,
            run=uuid.uuid4().hex,
            segment=0,
            schema=SCHEMA,
            created=time.time(),
            page_size=page_size,
            digest=DIGEST,
            model=model,
            layers=tuple(layers),
            options=recorded_options(options) | dict(flags or {}),
            capacity_tokens={Tier.DEVICE: device_tokens},
            cost=asdict(cost),
            detail=Detail(options.trace.detail),
        )
        check_continues(directory, self._header)
        self._writer = TraceWriter(directory, self._header, max_bytes=options.trace.megabytes << 20)
        atexit.register(self.close)

    def close(self) -> None:
        """Writes what waits. A scheduler that is killed loses what its writer had not written yet."""
        atexit.unregister(self.close)
        self._writer.close()

    # ---- requests ----

    def _record_host(self, tokens: int) -> None:
        sizes = {**self._header.capacity_tokens, Tier.HOST: tokens}
        self._writer.put(msgspec.structs.replace(self._header, capacity_tokens=sizes))

    def admitted(self, req: Req, clock: int) -> None:
        if self.host_tokens is not None:  # by the first request all tiers exist
            if tokens := self.host_tokens():
                self._record_host(tokens)
            self.host_tokens = None
        received = req.time_stats.scheduler_recv_time if req.time_stats else 0.0
        now = time.perf_counter()
        record = RequestAdmitted(
            request=self._number(req.rid),
            rid=req.rid,
            clock=clock,
            microseconds=self._microseconds(now),
            queued_microseconds=round((now - received) * 1e6) if received > 0 else 0,
            input_tokens=len(req.origin_input_ids),
            cached_tokens={
                Tier.DEVICE: req.cached_tokens_device,
                Tier.HOST: req.cached_tokens_host,
                Tier.STORAGE: req.cached_tokens_storage,
            },
            pages=NO_PAGES,
        )
        self._writer.put(record, prompt_of(req))

    def finished(self, req: Req, clock: int, answer_end: AnswerEnd) -> None:
        """The request ended, or was retracted."""
        reason = "retracted"
        if req.finished():
            assert req.finished_reason is not None
            reason = req.finished_reason.to_json()["type"]
        record = RequestFinished(
            request=self._number(req.rid),
            clock=clock,
            microseconds=self._microseconds(time.perf_counter()),
            reason=reason,
            output_tokens=len(req.output_ids_through_stop),
            pages=NO_PAGES,
            answer_end=answer_end.name.lower(),
        )
        self._writer.put(record, prompt_and_output_of(req))
        if not req.finished():
            return
        self._numbers.pop(req.rid, None)
        if answer_end is AnswerEnd.UNKNOWN:
            self._awaited[req.rid] = record.request
            if len(self._awaited) > MAX_AWAITED:
                self._awaited.popitem(last=False)

    def told(self, rid: str, clock: int, answer_end: AnswerEnd) -> None:
        """It became known how the answer of a finished request had ended."""
        request = self._awaited.pop(rid, None)
        if request is not None:
            microseconds = self._microseconds(time.perf_counter())
            self._writer.put(AnswerTold(request, clock, microseconds, answer_end.name.lower()))

    def folded(
        self, req: Req, observation: Observation, *, query: int, clock: int, weight: float, first: bool
    ) -> None:
        record = Fold(
            request=self._number(req.rid),
            query=query,
            clock=clock,
            weight=weight,
            first=first,
            body=observation.body.astype(np.float32),
            peak=observation.peak.astype(np.float32),
        )
        self._writer.put(record)

    def step(self, rid: str, phase: str, seq_len: int, scores: torch.Tensor, query_tokens: int) -> None:
        """One request in one emitting pass; ``scores`` as ``ScoreRows.add`` takes them."""
        mass, body, peak = scores.to("cpu").numpy()
        record = Step(
            request=self._number(rid),
            phase=phase,
            seq_len=seq_len,
            query_tokens=query_tokens,
            mass=(mass / query_tokens).astype(np.float16),
            body=(body / query_tokens).astype(np.float16),
            peak=peak.astype(np.float16),
        )
        self._writer.put(record)

    def page_lists(self, rid: str, lists: ObservedPages) -> None:
        """One token of a request: which pages it attends to most, and which it read."""
        dtype = np.uint16 if lists.seq_len <= 1 << 16 else np.uint32
        nothing = np.zeros(0, np.float32)
        chosen = [each for each in lists.chosen if each is not None]
        read, shares = (np.concatenate([each[part] for each in chosen] or [nothing]) for part in (0, 1))
        record = PageLists(
            request=self._number(rid),
            forward_pass=lists.forward_pass,
            seq_len=lists.seq_len,
            new_tokens=lists.new_tokens,
            layers=lists.layers,
            kv_heads=lists.pages.shape[1],
            pages=lists.pages.astype(dtype).ravel(),
            mass=lists.mass.astype(np.float16).ravel(),
            num_read=tuple(-1 if each is None else len(each[0]) for each in lists.chosen),
            read=read.astype(dtype),
            shares=shares.astype(np.float32),
        )
        self._writer.put(record)

    def _number(self, rid: str) -> int:
        number = self._numbers.get(rid)
        if number is None:
            number = self._numbers[rid] = self._next_number
            self._next_number += 1
            if len(self._numbers) > MAX_OPEN_REQUESTS:
                self._numbers.popitem(last=False)
        return number

    def _microseconds(self, now: float) -> int:
        return round((now - self._start) * 1e6)

    # ---- tree ----

    def event(
        self,
        kind: EventKind,
        tier: Tier,
        node: UnifiedTreeNode,
        *,
        depth_tokens: int,
        page_size: int,
        digest: bytes,
        clock: int,
        rid: str | None = None,
    ) -> None:
        """Something happened to a node.

        Args:
            depth_tokens: tokens between the root and the node.
            digest: chained digest of the node's last page.
            rid: request that caused it; None where none did, or it is not known.
        """
        assert node.parent is not None
        record = TreeEvent(
            kind=kind,
            tier=tier,
            clock=clock,
            request=None if rid is None else self._number(rid),
            node=node.id,
            parent=node.parent.id,
            depth_pages=depth_tokens // page_size,
            num_pages=len(key_of(node)) // page_size,
            digest=digest,
        )
        self._writer.put(record)

    def reset(self, clock: int) -> None:
        """The tree was emptied at once."""
        self._writer.put(TreeEvent(EventKind.RESET, Tier.DEVICE, clock, None, 0, 0, 0, 0, b""))

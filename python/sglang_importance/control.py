"""Messages between the HTTP process and the schedulers, and their handlers.

sglang's control plane fans a message out to every scheduler and collects one answer from each. Both
processes must know the types (``hook_custom_types``); the tokenizer manager makes a communicator for each
entry of ``_COMMUNICATOR_SPECS``.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from sglang.srt.managers import io_struct, tokenizer_control_mixin
from sglang.srt.managers.io_struct import BaseReq
from sglang.utils import TypeBasedDispatcher

from sglang_importance.snapshot import DEFAULT_LIMIT, InvalidCursor, run_slice, snapshot
from sglang_importance.storage.weights import WATCH

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_importance.cache import ImportanceRadixCache

COMMUNICATOR = "kv_importance"
MAX_JOBS = 8  # callers that went away leave theirs; the oldest makes room


class KvImportanceReq(BaseReq, kw_only=True):
    """Asks a scheduler for one page of its tree, or to go on with a job that it began."""

    limit: int = DEFAULT_LIMIT
    cursor: str | None = None
    min_tokens: int = 0
    job: int | None = None


class KvImportanceReqOutput(BaseReq, kw_only=True):
    """One scheduler's answer: a JSON document, an error that is the caller's, or a job to be continued."""

    document: str = ""
    error: str | None = None
    job: int | None = None


def register_messages() -> None:
    """Makes the types known to this process; call it once, before the tokenizer manager is built."""
    io_struct.hook_custom_types(KvImportanceReq, KvImportanceReqOutput)
    spec = (COMMUNICATOR, KvImportanceReqOutput)
    if spec not in tokenizer_control_mixin._COMMUNICATOR_SPECS:
        tokenizer_control_mixin._COMMUNICATOR_SPECS.append(spec)


class SnapshotDesk:
    """Answers a scheduler's snapshot requests, one slice for each message.

    The caller drives its job by asking again, so the scheduler steps between the slices, and a caller that
    goes away leaves nothing running.
    """

    def __init__(self, cache: ImportanceRadixCache) -> None:
        self._cache = cache
        self._jobs: OrderedDict[int, Generator[None, None, dict[str, Any]]] = OrderedDict()
        self._serial = 0

    def answer(self, request: KvImportanceReq) -> KvImportanceReqOutput:
        job = request.job if request.job is not None else self._begin(request)
        snapshot_job = self._jobs.pop(job, None)
        if snapshot_job is None:
            return KvImportanceReqOutput(error="too many snapshots at once: ask again")
        try:
            document = run_slice(snapshot_job)
        except InvalidCursor as error:
            return KvImportanceReqOutput(error=str(error))
        if document is not None:
            if counts := WATCH.counters.values():
                names = {key: f"{key[0]}.{key[1]}" if key[1] else key[0] for key in counts}
                document["store"] = {names[key]: count for key, count in counts.items()}
            return KvImportanceReqOutput(document=json.dumps(document))
        self._jobs[job] = snapshot_job
        return KvImportanceReqOutput(job=job)

    def _begin(self, request: KvImportanceReq) -> int:
        self._serial += 1
        self._jobs[self._serial] = snapshot(
            self._cache, limit=request.limit, cursor=request.cursor, min_tokens=request.min_tokens
        )
        while len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)
        return self._serial


def handle_messages(scheduler: Scheduler) -> None:
    """Adds our handlers to a scheduler's dispatcher."""
    desk = SnapshotDesk(scheduler.tree_cache)
    scheduler._request_dispatcher += TypeBasedDispatcher([(KvImportanceReq, desk.answer)])

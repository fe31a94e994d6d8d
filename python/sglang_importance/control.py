"""Messages between the HTTP process and the schedulers, and their handlers.

sglang's control plane fans a message out to every scheduler and collects one answer from each. Both
processes must know the types (``hook_custom_types``); the tokenizer manager makes a communicator for each
entry of ``_COMMUNICATOR_SPECS``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from sglang.srt.managers import io_struct, tokenizer_control_mixin
from sglang.srt.managers.io_struct import BaseReq
from sglang.utils import TypeBasedDispatcher

from sglang_importance.snapshot import DEFAULT_LIMIT, InvalidCursor, snapshot

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

COMMUNICATOR = "kv_importance"


class KvImportanceReq(BaseReq, kw_only=True):
    """Asks a scheduler for one page of its tree."""

    limit: int = DEFAULT_LIMIT
    cursor: str | None = None
    min_tokens: int = 0


class KvImportanceReqOutput(BaseReq, kw_only=True):
    """One scheduler's answer: a JSON document, or an error that is the caller's."""

    document: str = ""
    error: str | None = None


def register_messages() -> None:
    """Makes the types known to this process; call it once, before the tokenizer manager is built."""
    io_struct.hook_custom_types(KvImportanceReq, KvImportanceReqOutput)
    spec = (COMMUNICATOR, KvImportanceReqOutput)
    if spec not in tokenizer_control_mixin._COMMUNICATOR_SPECS:
        tokenizer_control_mixin._COMMUNICATOR_SPECS.append(spec)


def answer(scheduler: Scheduler, request: KvImportanceReq) -> KvImportanceReqOutput:
    """Runs in the scheduler, between two steps."""
    try:
        page = snapshot(
            scheduler.tree_cache, limit=request.limit, cursor=request.cursor, min_tokens=request.min_tokens
        )
    except InvalidCursor as error:
        return KvImportanceReqOutput(error=str(error))
    return KvImportanceReqOutput(document=json.dumps(page))


def handle_messages(scheduler: Scheduler) -> None:
    """Adds our handlers to a scheduler's dispatcher."""
    scheduler._request_dispatcher += TypeBasedDispatcher(
        [(KvImportanceReq, lambda request: answer(scheduler, request))]
    )

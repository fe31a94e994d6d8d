"""Messages between the HTTP process and the schedulers, and a scheduler's handlers of them.

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

from sglang_importance.operations import (
    answers,
    node_view,
    page_importance,
    pin_operations,
    prefix_search,
    prewarm_facts,
    recent_events,
    snapshot,
    tree_view,
)
from sglang_importance.operations.job import Operation
from sglang_importance.operations.runner import Desk
from sglang_importance.radix_cache.importance_cache import ImportanceRadixCache

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

COMMUNICATOR = "kv_importance"

OPERATIONS: dict[str, Operation] = {
    "prewarm_facts": prewarm_facts.facts,
    "prewarm_room": prewarm_facts.room,
    "snapshot": snapshot.describe_tree,
    "importance": page_importance.importance,
    "tree": tree_view.tree,
    "node": node_view.node,
    "node_prompt": node_view.prompt,
    "find": prefix_search.find,
    "events": recent_events.events,
    "pin": pin_operations.pin,
    "unpin": pin_operations.unpin,
    "pins": pin_operations.pins,
    "answered": answers.answered,
}
WITHOUT_LEARNING = frozenset({"snapshot", "tree", "find", "events", "prewarm_room"})
"""Operations that answer also when a fault has ended learning: nothing is known of nodes then."""


class KvImportanceReq(BaseReq, kw_only=True):
    """Asks a scheduler for an operation with arguments (JSON), or to go on with a job that it began."""

    operation: str = ""
    arguments: str = "{}"
    job: int | None = None


class KvImportanceReqOutput(BaseReq, kw_only=True):
    """One scheduler's answer; the fields of ``runner.Reply``."""

    document: str = ""
    error: str | None = None
    status: int = 200
    job: int | None = None


def register_messages() -> None:
    """Makes the types known to this process; call it once, before the tokenizer manager is built."""
    io_struct.hook_custom_types(KvImportanceReq, KvImportanceReqOutput)
    spec = (COMMUNICATOR, KvImportanceReqOutput)
    if spec not in tokenizer_control_mixin._COMMUNICATOR_SPECS:
        tokenizer_control_mixin._COMMUNICATOR_SPECS.append(spec)


def handle_messages(scheduler: Scheduler) -> None:
    """Adds our handlers to a scheduler's dispatcher."""

    cache = scheduler.tree_cache
    assert isinstance(cache, ImportanceRadixCache), "sglang built another cache"

    def account(operation: str, seconds: float, is_over: bool) -> None:
        component = cache.importance
        component.state.counters.answered(operation, seconds, is_over=is_over)
        if is_over:
            component.publish()

    desk = Desk(cache, OPERATIONS, WITHOUT_LEARNING, account)

    def answer(request: KvImportanceReq) -> KvImportanceReqOutput:
        if request.job is not None:
            reply = desk.resume(request.job)
        else:
            reply = desk.begin(request.operation, json.loads(request.arguments))
        return KvImportanceReqOutput(**reply._asdict())

    scheduler._request_dispatcher += TypeBasedDispatcher([(KvImportanceReq, answer)])

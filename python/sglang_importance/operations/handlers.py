"""A scheduler's handlers of what the HTTP process asks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from sglang.srt.runtime_context import get_serving
from sglang.utils import TypeBasedDispatcher

from sglang_importance.cache.importance_cache import ImportanceRadixCache
from sglang_importance.operations import (
    miss_view,
    node_view,
    page_importance,
    parsed_answers,
    pin_operations,
    prefix_search,
    prewarm_facts,
    recent_events,
    session_operations,
    snapshot,
    tree_view,
)
from sglang_importance.operations.job import Operation
from sglang_importance.operations.messages import KvImportanceReq, KvImportanceReqOutput
from sglang_importance.operations.runner import MAX_JOBS, Desk, Reply
from sglang_importance.upstream.server_options import data_parallel_rank

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

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
    "why": miss_view.why,
    "why_prompt": miss_view.why_prompt,
    "pin": pin_operations.pin,
    "unpin": pin_operations.unpin,
    "pins": pin_operations.pins,
    "answered": parsed_answers.answered,
    "close_session": session_operations.close_session,
}
FOLLOWED: dict[str, Operation] = {
    "pin": pin_operations.pin,
    "unpin": pin_operations.unpin,
    "pins": pin_operations.let_time_pass,
    "events": recent_events.let_time_pass,
    "answered": parsed_answers.answered,
    "close_session": session_operations.close_session,
}
"""What the operations change in the tree: all that a tensor-parallel rank does whose answers nobody reads.
Reading may take more slices on one rank than on another, and does not run there."""
WITHOUT_LEARNING = frozenset({"snapshot", "tree", "find", "events", "prewarm_room", "close_session"})
"""Operations that answer also when a fault has ended learning: nothing is known of nodes then."""


def handle_messages(scheduler: Scheduler) -> None:
    """Adds our handlers to a scheduler's dispatcher."""

    cache = scheduler.tree_cache
    assert isinstance(cache, ImportanceRadixCache), "sglang built another cache"

    cache.importance.requests.sessions.is_opened = scheduler.session_controller.__contains__

    def account(operation: str, seconds: float, is_over: bool) -> None:
        component = cache.importance
        component.state.counters.answered(operation, seconds, is_over=is_over)
        if is_over:
            component.publish()

    leads, rank = cache.importance.state.ranks.leads, data_parallel_rank()
    desk = Desk(
        cache,
        OPERATIONS if leads else FOLLOWED,
        WITHOUT_LEARNING,
        account,
        follows=not leads,
        max_jobs=MAX_JOBS * get_serving().tokenizer_worker_num,
    )

    def answer(request: KvImportanceReq) -> KvImportanceReqOutput:
        if request.jobs is None:
            reply = desk.begin(request.operation, json.loads(request.arguments))
        elif rank in request.jobs:
            reply = desk.resume(request.jobs[rank])
        else:
            reply = Reply()  # this rank has answered: others go on
        return KvImportanceReqOutput(**reply._asdict(), dp_rank=rank)

    scheduler._request_dispatcher += TypeBasedDispatcher([(KvImportanceReq, answer)])

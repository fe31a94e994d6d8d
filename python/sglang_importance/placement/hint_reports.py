"""Reports on requests with hints, carried from a scheduler to the HTTP process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sglang_importance.upstream.hooks import Hook, HookType
from sglang_importance.upstream.request_record import found_tokens, record_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

# The values of this map of sglang's are numbers and words: ours is JSON.
REPORT_KEY = "kv_importance"
DETAILS_TARGET = (
    "sglang.srt.managers.scheduler_components.output_streamer."
    "SchedulerOutputStreamer.get_cached_tokens_details"
)


def _after_get_cached_tokens_details(
    details: dict[str, int | str] | None, streamer: SchedulerOutputStreamer, req: Req
) -> dict[str, int | str] | None:
    record = record_of(req)
    if record.make_report is None or not req.finished():
        return None
    report = record.make_report(found_tokens(req))
    if report is None:
        return None
    if record.selection is not None:
        report["pages"] = record.selection.report()
    return {**(details or {}), REPORT_KEY: json.dumps(report)}


SESSION_TARGET = "sglang.srt.session.session_controller.Session.create_req"


def _after_create_req(req: Req, session: object, received: Any, *args: Any, **kwargs: Any) -> Req:
    """sglang drops the hints of a request in a session that ``/open_session`` opened."""
    req.kv_hints = received.kv_hints
    return req


HOOKS: dict[str, Hook] = {
    DETAILS_TARGET: (_after_get_cached_tokens_details, HookType.AFTER),
    SESSION_TARGET: (_after_create_req, HookType.AFTER),
}
"""The hooks in a scheduler through which hints reach every request, and reports its answer."""

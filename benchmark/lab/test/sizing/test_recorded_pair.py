"""The comparison behind a recording: which of its requests count."""

from __future__ import annotations

from pathlib import Path

from sgl_importance.observe.trace.arrivals import HEALTH_CHECK_PREFIX
from sgl_importance.observe.trace.reader import open_trace
from sgl_importance.observe.trace.records import AnswerTold, RequestAdmitted, RequestFinished
from sgl_importance.observe.trace.token_sequence import TokenSequence
from sgl_importance.observe.trace.writer import NO_PAGES, TraceWriter
from sgl_importance_lab.sizing.recorded_pair import recorded_pair

from support.workloads.recordings import PAGE_SIZE, make_header

PROMPT_TOKENS = 3 * PAGE_SIZE


def record(directory: Path, rids: list[str]) -> None:
    """Requests that ask the same."""
    writer = TraceWriter(directory, make_header(), max_bytes=1 << 24)
    prompt = TokenSequence((None, None), list(range(PROMPT_TOKENS)))
    for request, rid in enumerate(rids):
        clock = request + 1
        admitted = RequestAdmitted(request, rid, clock, request, 0, PROMPT_TOKENS, {"device": 0}, NO_PAGES)
        writer.put(admitted, prompt)
        writer.put(RequestFinished(request, clock, request, "length", 1, NO_PAGES), prompt)
        writer.put(AnswerTold(request, clock, request, "tool_call"))
    writer.close()


def test_the_server_s_own_requests_do_not_count(tmp_path: Path) -> None:
    record(tmp_path, [f"{HEALTH_CHECK_PREFIX}_1", "chat/0/0", f"{HEALTH_CHECK_PREFIX}_2", "chat/0/1"])
    pair = recorded_pair(open_trace(tmp_path))
    assert pair is not None
    assert (pair.comparison.requests, pair.comparison.prompt_tokens) == (2, 2 * PROMPT_TOKENS)
    assert 0 < pair.comparison.lru_hit_tokens < PROMPT_TOKENS

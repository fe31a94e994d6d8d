"""``kv_hints`` in the body of OpenAI requests, and ``usage.kv_importance`` in their answers.

sglang's request models drop fields that they do not know, and its answers have no place for ours: both are
dealt with where the body is still at hand and the answer is not yet sent. Requests without hints pass.

A gateway in front drops such fields too, sglang's own router among them, but carries OpenAI's ``metadata``,
whose values are texts: hints may stand there as JSON.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import Request
from fastapi.encoders import jsonable_encoder
from fastapi.responses import JSONResponse, Response, StreamingResponse
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase

from sgl_importance.hints.hints import FIELD, BadHint, Hints
from sgl_importance.json_text import read_json
from sglang_importance.http.requests.request_hints import STATE_ATTRIBUTE, OpenAIHints
from sglang_importance.placement.hint_reports import REPORT_KEY
from sglang_importance.upstream.hooks import Hook, HookType
from sglang_importance.upstream.server_options import importance_options

METADATA = "metadata"
HANDLE_TARGET = "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase.handle_request"


async def _around_handle_request(
    handle: Callable[..., Awaitable[Any]],
    serving: OpenAIServingBase,
    request: Any,
    raw_request: Request | None,
) -> Any:
    if importance_options(serving.tokenizer_manager.server_args) is None:
        return await handle(serving, request, raw_request)
    try:
        value = await _hints_in_body(request, raw_request)
        if value is None:
            return await handle(serving, request, raw_request)
        hints = Hints.parse(value)
    except BadHint as error:
        return serving.create_error_response(str(error), err_type="BadRequest", param=error.field)
    assert raw_request is not None
    openai = _openai_hints(value, hints, serving, request, raw_request)
    setattr(raw_request.state, STATE_ATTRIBUTE, openai)
    answer = await handle(serving, request, raw_request)
    if not hints.report:
        return answer
    return _with_report(answer, openai, request.n or 1)


async def _hints_in_body(request: Any, raw_request: Request | None) -> Any:
    if raw_request is None or not isinstance(request, ChatCompletionRequest | CompletionRequest):
        return None
    body = await raw_request.json()  # parsed before: the request keeps it
    if body.get(FIELD) is not None:
        return body[FIELD]
    metadata = body.get(METADATA)
    text = metadata.get(FIELD) if isinstance(metadata, dict) else None
    try:
        return None if text is None else read_json(text)
    except (TypeError, ValueError):
        raise BadHint(f"{METADATA}.{FIELD}", "Input should be JSON in a text") from None


def _openai_hints(
    value: object, hints: Hints, serving: Any, request: Any, raw_request: Request
) -> OpenAIHints:
    messages = request.messages if isinstance(request, ChatCompletionRequest) else []

    def tokens_of(count: int) -> list[int]:
        shorter = request.model_copy(update={"messages": messages[:count], "continue_final_message": False})
        internal, _ = serving._convert_to_internal_request(shorter, raw_request)
        return list(internal.input_ids)

    return OpenAIHints(value, hints, len(messages), tokens_of, {})


def _with_report(answer: Any, openai: OpenAIHints, choices: int) -> Any:
    if isinstance(answer, StreamingResponse):
        answer.body_iterator = _chunks_with_report(answer.body_iterator, openai, choices)
        return answer
    if isinstance(answer, Response):
        return answer  # an error
    return JSONResponse(_document_with_report(jsonable_encoder(answer), openai, choices))


async def _chunks_with_report(
    chunks: AsyncIterable[Any], openai: OpenAIHints, choices: int
) -> AsyncIterator[Any]:
    async for chunk in chunks:
        yield _chunk_with_report(chunk, openai, choices)


def _chunk_with_report(chunk: Any, openai: OpenAIHints, choices: int) -> Any:
    """The chunk with our report where it is the one with the usage of the whole request."""
    prefix = "data: "
    if not isinstance(chunk, str) or not chunk.startswith(prefix) or '"choices":[]' not in chunk:
        return chunk
    document = json.loads(chunk.removeprefix(prefix))
    if not document.get("usage"):
        return chunk
    return f"{prefix}{json.dumps(_document_with_report(document, openai, choices))}\n\n"


def _document_with_report(document: dict[str, Any], openai: OpenAIHints, choices: int) -> dict[str, Any]:
    # As sglang counts cached tokens: once per prompt, at its first choice.
    reports = [report for index, report in sorted(openai.reports.items()) if index % choices == 0]
    if reports:
        document["usage"][REPORT_KEY] = reports[0] if len(reports) == 1 else reports
    return document


HOOKS: dict[str, Hook] = {HANDLE_TARGET: (_around_handle_request, HookType.AROUND)}
"""Hooks in the launcher, through which the OpenAI routes take hints and give reports."""

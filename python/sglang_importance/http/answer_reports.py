"""Tells the scheduler how chat answers ended, where it could not see that by their tokens.

sglang's HTTP process parses calls of tools out of the text and says so in ``finish_reason``. That goes to the
scheduler behind the answer. A report that is lost leaves the end unknown.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import cache
from typing import Any

from fastapi import HTTPException
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ChatCompletionResponse
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sgl_importance.reuse.answer_end import AnswerEnd, AnswerMarkers
from sglang_importance.http.scheduler_client import ask
from sglang_importance.http.server_state import server_arguments, tokenizer_manager
from sglang_importance.placement.answer_ends import answer_markers
from sglang_importance.upstream.hooks import Hook, HookType

_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"

logger = logging.getLogger(__name__)

ENDS = {"stop": AnswerEnd.END_OF_TURN, "tool_calls": AnswerEnd.TOOL_CALL}
"""By OpenAI's reason; all others the scheduler knows."""
MAX_WAITING = 1024
_ATTRIBUTE = "kv_importance_answer_reports"
_CHUNK = "data: "


class AnswerReports:
    """Sends reports in batches, one batch at a time; those that do not fit are lost."""

    def __init__(self) -> None:
        self._waiting: dict[str, int] = {}
        self._sending: asyncio.Task[None] | None = None

    def tell(self, rid: str, reason: str | None) -> None:
        """The answer of a request has this ``finish_reason``."""
        if reason not in ENDS or len(self._waiting) >= MAX_WAITING:
            return
        self._waiting[rid] = int(ENDS[reason])
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, {}
            try:
                await ask("answered", {"ends": batch})
            except HTTPException as error:  # a fault has ended learning, or is about to
                logger.debug("%d ends of answers are not known: %s", len(batch), error.detail)


def answer_reports(manager: TokenizerManager) -> AnswerReports:
    """The reports that a tokenizer manager's server sends."""
    known: AnswerReports | None = getattr(manager, _ATTRIBUTE, None)
    if known is None:
        known = AnswerReports()
        setattr(manager, _ATTRIBUTE, known)
    return known


@cache
def _markers() -> AnswerMarkers | None:
    return answer_markers(server_arguments().tool_call_parser, tokenizer_manager().tokenizer)


def _is_wanted(request: ChatCompletionRequest) -> bool:
    """Whether the tokens of the request's answer may leave its end open; of several choices none is told."""
    markers = _markers()
    if markers is None or (request.n or 1) != 1:
        return False
    is_json = request.response_format is not None or request.tool_choice not in ("auto", "none")
    return is_json or not markers.mark_every_call


def _after_response(
    response: Any, serving: OpenAIServingChat, request: ChatCompletionRequest, *args: Any
) -> Any:
    if isinstance(response, ChatCompletionResponse) and _is_wanted(request):
        answer_reports(serving.tokenizer_manager).tell(response.id, response.choices[0].finish_reason)
    return response


def _after_stream(
    chunks: AsyncGenerator[str, None],
    serving: OpenAIServingChat,
    adapted: Any,
    request: ChatCompletionRequest,
    *args: Any,
) -> AsyncGenerator[str, None]:
    return _watched(chunks, answer_reports(serving.tokenizer_manager)) if _is_wanted(request) else chunks


async def _watched(chunks: AsyncGenerator[str, None], reports: AnswerReports) -> AsyncGenerator[str, None]:
    async with aclosing(chunks):
        async for chunk in chunks:
            if chunk.startswith(_CHUNK) and '"finish_reason":"' in chunk:
                document = json.loads(chunk.removeprefix(_CHUNK))
                for choice in document["choices"]:
                    reports.tell(document["id"], choice["finish_reason"])
            yield chunk


HOOKS: dict[str, Hook] = {
    f"{_CHAT}._build_chat_response": (_after_response, HookType.AFTER),
    f"{_CHAT}._generate_chat_stream": (_after_stream, HookType.AFTER),
}
"""Hooks in the launcher, through which answers to chats pass, OpenAI's and Anthropic's."""

"""sglang's routes turn a body into a request or into tokens; what they cannot turn is the client's error.

``OpenAIServingBase.handle_request`` answers 500 to whatever is no ``ValueError`` there. Routes of tokens and
of Anthropic's messages do so to more: where a chat template refuses the roles, for one.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

from sglang_importance.http.requests.unreadable import UNREADABLE, unreadable
from sglang_importance.http.server_state import tokenizer_manager
from sglang_importance.upstream.hooks import Hook, HookType
from sglang_importance.upstream.server_options import importance_options

_PACKAGE = "sglang.srt.entrypoints.openai"
TARGETS = tuple(
    f"{_PACKAGE}.{module}._convert_to_internal_request"
    for module in (
        "serving_chat.OpenAIServingChat",
        "serving_completions.OpenAIServingCompletion",
        "serving_embedding.OpenAIServingEmbedding",
        "serving_classify.OpenAIServingClassify",
        "serving_rerank.OpenAIServingRerank",
        "serving_score.OpenAIServingScore",
    )
)


def _around_convert(convert: Callable[..., Any], serving: Any, request: Any, raw_request: Any = None) -> Any:
    if importance_options(serving.tokenizer_manager.server_args) is None:
        return convert(serving, request, raw_request)
    try:
        return convert(serving, request, raw_request)
    except UNREADABLE as error:
        raise ValueError(unreadable(error)) from error


_ANTHROPIC = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._error_response"
ANSWER_TARGETS = (
    f"{_PACKAGE}.serving_tokenize.OpenAIServingTokenize.create_error_response",
    f"{_PACKAGE}.serving_tokenize.OpenAIServingDetokenize.create_error_response",
    _ANTHROPIC,
)
_READING = frozenset(
    {"_convert_to_internal_request", "_process_messages", "_tokenize_chat_request", "encode", "decode"}
)
"""Functions within which an error is about what the client wrote; behind them something is computed."""


def _around_error(respond: Callable[..., Any], serving: Any, *args: Any, **fields: Any) -> Any:
    error = sys.exception()
    if fields.get("status_code") != 500 or not isinstance(error, (ValueError, *UNREADABLE)):
        return respond(serving, *args, **fields)
    frames = traceback.extract_tb(error.__traceback__)
    if importance_options(tokenizer_manager().server_args) is None or not any(
        frame.name in _READING for frame in frames
    ):
        return respond(serving, *args, **fields)
    said = {"message": unreadable(error), "status_code": 400}
    if "error_type" in fields:
        return respond(serving, **said, error_type="invalid_request_error")
    return respond(serving, **said)


HOOKS: dict[str, Hook] = {
    **dict.fromkeys(TARGETS, (_around_convert, HookType.AROUND)),
    **dict.fromkeys(ANSWER_TARGETS, (_around_error, HookType.AROUND)),
}
"""Hooks in the launcher."""

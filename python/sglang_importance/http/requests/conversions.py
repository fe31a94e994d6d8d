"""sglang's OpenAI routes turn a body into a request of its own; what they cannot turn is the client's error.

``OpenAIServingBase.handle_request`` answers 500 to whatever is not a ``ValueError`` there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_importance.http.requests.unreadable import UNREADABLE, unreadable
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


HOOKS: dict[str, Hook] = dict.fromkeys(TARGETS, (_around_convert, HookType.AROUND))
"""Hooks in the launcher."""

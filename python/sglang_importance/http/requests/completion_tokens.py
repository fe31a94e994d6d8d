"""Token ids in ``prompt`` of ``/v1/completions``, refused by that name where the model does not have them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request
from sglang.srt.entrypoints.openai.protocol import CompletionRequest
from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase

from sglang_importance.http.requests.token_limits import BadTokens, check_token_ids
from sglang_importance.upstream.hooks import Hook, HookType
from sglang_importance.upstream.server_options import importance_options

HANDLE_TARGET = "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase.handle_request"


async def _around_handle_request(
    handle: Callable[..., Awaitable[Any]],
    serving: OpenAIServingBase,
    request: Any,
    raw_request: Request | None,
) -> Any:
    if importance_options(serving.tokenizer_manager.server_args) is not None and isinstance(
        request, CompletionRequest
    ):
        try:
            check_token_ids("prompt", request.prompt, serving.tokenizer_manager.model_config.vocab_size)
        except BadTokens as error:
            return serving.create_error_response(str(error), err_type="BadRequest", param="prompt")
    return await handle(serving, request, raw_request)


HOOKS: dict[str, Hook] = {HANDLE_TARGET: (_around_handle_request, HookType.AROUND)}
"""The hook in the launcher through which OpenAI's completions are looked at."""

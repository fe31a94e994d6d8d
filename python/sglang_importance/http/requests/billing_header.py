"""The line with which Claude Code begins every system prompt is for Anthropic's billing, not for a model.

Its hash changes with each request, so that nothing behind it is ever found in a cache
(https://github.com/anthropics/claude-code/issues/68900). Anthropic's own server takes it off. So does ours
under ``--kv-policy importance``; under ``observe`` it stays, as stock has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from sglang_importance.upstream.hooks import Hook, HookType
from sglang_importance.upstream.server_options import importance_options

TARGET = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._convert_to_chat_completion_request"

_HEADER = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")


def without_header(system: Any) -> Any:
    """
    Args:
        system: of a request to ``/v1/messages``: a text, blocks with a ``text``, or None.
    """
    if isinstance(system, str):
        return _HEADER.sub("", system)
    if not system or not isinstance(text := getattr(system[0], "text", None), str):
        return system
    rest = _HEADER.sub("", text)
    first = [system[0].model_copy(update={"text": rest})] if rest else []
    return [*first, *system[1:]]


def _around_convert(convert: Callable[..., Any], serving: Any, anthropic_request: Any) -> Any:
    options = importance_options(serving.openai_serving_chat.tokenizer_manager.server_args)
    if options is not None and options.policy == "importance":
        system = without_header(anthropic_request.system)
        anthropic_request = anthropic_request.model_copy(update={"system": system})
    return convert(serving, anthropic_request)


HOOKS: dict[str, Hook] = {TARGET: (_around_convert, HookType.AROUND)}
"""The hook in the launcher; it covers ``/v1/messages`` and its count of tokens."""

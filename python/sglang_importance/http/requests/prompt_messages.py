"""The messages of a request, as hints name them, and the tokens that the first of them make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessage

from sgl_importance.placement.hints.block_places import locate_messages
from sgl_importance.placement.hints.hints import Hints


@dataclass(frozen=True)
class PromptMessages:
    """Attributes:
    count: of the request; 0 where hints cannot name any.
    tokens_of: the prompt that the first n messages alone would make; of 0, where a route knows breakpoints,
        the prompt of another first message.
    """

    count: int = 0
    tokens_of: Callable[[int], list[int]] = lambda count: []

    def check(self, hints: Hints) -> None:
        """
        Raises:
            BadHint: a message is named that the request does not have.
        """
        locate_messages(hints, self.count, lambda messages: messages)

    def located(self, hints: Hints, prompt: list[int]) -> Hints:
        """The hints with tokens for messages."""

        def end_of(messages: int) -> int:
            return self.end_of(messages, prompt) if messages else 0

        return locate_messages(hints, self.count, end_of)

    def end_of(self, messages: int, prompt: list[int]) -> int:
        """Tokens of the prompt up to the end of the first so many messages; of 0, up to the first one."""
        if messages == self.count:
            return len(prompt)
        # Templates open an answer behind the last message: what both prompts have is the messages' own.
        return _common_prefix(self.tokens_of(messages), prompt)


_ANOTHER = AnthropicMessage(role="user", content="\x1f")
"""Begins with what no prompt begins with."""


def _common_prefix(first: list[int], second: list[int]) -> int:
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))


def no_messages(request: Any, raw_request: Request) -> PromptMessages:
    """Of routes whose prompt is not made of chat messages, or not of those of the body alone."""
    return PromptMessages()


def chat_messages(request: Any, raw_request: Request) -> PromptMessages:
    """Of an OpenAI chat."""

    def tokens_of(count: int) -> list[int]:
        shorter = {"messages": request.messages[:count], "continue_final_message": False}
        return _chat_tokens(request.model_copy(update=shorter), raw_request)

    return PromptMessages(len(request.messages), tokens_of)


def anthropic_messages(request: Any, raw_request: Request) -> PromptMessages:
    """Of Anthropic's: its ``system`` stands before the first and is none of them."""

    def tokens_of(count: int) -> list[int]:
        serving = raw_request.app.state.anthropic_serving
        messages = request.messages[:count] or [_ANOTHER]
        shorter = request.model_copy(update={"messages": messages})
        return _chat_tokens(serving._convert_to_chat_completion_request(shorter), raw_request)

    return PromptMessages(len(request.messages), tokens_of)


def _chat_tokens(request: Any, raw_request: Request) -> list[int]:
    internal, _ = raw_request.app.state.openai_serving_chat._convert_to_internal_request(request, raw_request)
    return list(internal.input_ids)

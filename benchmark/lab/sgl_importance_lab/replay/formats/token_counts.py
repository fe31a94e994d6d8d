"""Prompts as token ids: by a Hugging Face tokenizer and its chat template, or as bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from sgl_importance.errors import ImportanceError
from sgl_importance_lab.replay.formats.line_reader import TraceError


class PromptError(ImportanceError, ValueError):
    """A record's prompt cannot be turned into tokens; the message says why."""


class Encoder(Protocol):
    def text(self, text: str) -> list[int]:
        """Token ids of plain text."""

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        """Token ids of a conversation that the model is to go on with.

        Raises:
            PromptError: the messages do not fit the chat template.
        """


class ByteEncoder:
    """UTF-8 bytes; a conversation becomes its messages one after the other, each behind its role."""

    def text(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        head = f"<tools>{json.dumps(tools)}\n" if tools else ""
        return self.text(head + "".join(_as_text(message) for message in messages))


def _as_text(message: dict[str, Any]) -> str:
    """Role first, then everything else in a fixed order."""
    content = message.get("content")
    rest = {key: value for key, value in sorted(message.items()) if key not in ("role", "content")}
    text = content if isinstance(content, str) else json.dumps(content)
    return f"<{message.get('role', '')}>{text}{json.dumps(rest) if rest else ''}\n"


class HuggingFaceEncoder:
    """A tokenizer of transformers; conversations go through its chat template if it has one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text(self, text: str) -> list[int]:
        ids: Sequence[int] = self._tokenizer.encode(text)
        return list(ids)

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        if not self._tokenizer.chat_template:
            return self.text("".join(_as_text(message) for message in messages))
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates are programs, and raise what they like
            raise PromptError(f"does not fit the chat template: {error}") from error
        ids: Sequence[int] = self._tokenizer.encode(rendered, add_special_tokens=False)
        return list(ids)


def load_encoder(tokenizer: str | None) -> Encoder:
    """
    Args:
        tokenizer: folder or name of a Hugging Face tokenizer; None for bytes.

    Raises:
        TraceError: it cannot be loaded.
    """
    if tokenizer is None:
        return ByteEncoder()
    try:
        from transformers import PreTrainedTokenizerFast  # AutoTokenizer would import model code
    except ImportError as error:
        raise TraceError("--tokenizer needs transformers: pip install transformers") from error
    try:
        return HuggingFaceEncoder(PreTrainedTokenizerFast.from_pretrained(tokenizer))
    except (OSError, ValueError) as error:
        cause = str(error).strip().splitlines()[0]
        raise TraceError(f"--tokenizer {tokenizer}: give a folder or a model's name: {cause}") from error

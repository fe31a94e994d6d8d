"""The probe's tokenizer and chat template.

Spaces belong to the word before them, so a value ends its record as the very token that answers a question.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from sgl_importance_lab.probe.vocabulary import word_pieces
from sgl_importance_lab.probe.word_tokenizer import (
    ASSISTANT,
    BEGIN,
    END,
    PAD,
    SPECIAL_TOKENS,
    SYSTEM,
    USER,
    WordTokenizer,
)

__all__ = [
    "ASSISTANT",
    "BEGIN",
    "CHAT_TEMPLATE",
    "END",
    "PAD",
    "SPECIAL_TOKENS",
    "SYSTEM",
    "USER",
    "encode",
    "encode_text",
    "piece_ids",
    "render",
    "token_ids",
    "vocabulary_size",
    "write_tokenizer",
]

CHAT_TEMPLATE = (
    "{{- '<|begin|>' -}}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}"
    "{{- '<|assistant|>' + message.content | trim + '<|end|>' -}}"
    "{%- elif message.role == 'system' -%}"
    "{{- '<|system|>' + message.content | trim + ' ' -}}"
    "{%- else -%}"
    "{{- '<|user|>' + message.content | trim + ' ' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


@cache
def _tokenizer() -> WordTokenizer:
    return WordTokenizer(words=word_pieces(), chat_template=CHAT_TEMPLATE)


def token_ids() -> dict[str, int]:
    """Token id of every special token and word piece, by its text. Bytes come between the two groups."""
    return _tokenizer().ids


def vocabulary_size() -> int:
    """Number of tokens: special tokens, 256 bytes, word pieces."""
    return _tokenizer().size


def render(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """The text that the chat template makes of `messages`, without a template engine."""
    parts = [BEGIN]
    for message in messages:
        content = message["content"].strip()
        match message["role"]:
            case "assistant":
                parts += [ASSISTANT, content, END]
            case "system":
                parts += [SYSTEM, content, " "]
            case _:
                parts += [USER, content, " "]
    if add_generation_prompt:
        parts.append(ASSISTANT)
    return "".join(parts)


def piece_ids(piece: str) -> list[int]:
    """The ids of a piece of text: one for a word of the language, else one for each of its bytes."""
    return _tokenizer().piece_ids(piece)


def encode(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
    """Token ids of a chat as the served tokenizer gives them, without any library; for ASCII text."""
    return encode_text(render(messages, add_generation_prompt))


def encode_text(text: str) -> list[int]:
    """Token ids of a text, special tokens in it included, as ``encode`` gives those of a chat."""
    return _tokenizer().encode(text)


def write_tokenizer(directory: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json (with the chat template) into `directory`."""
    _tokenizer().write(directory)

"""The probe's tokenizer: one token per word of the probe language, one per byte of any other text.

A byte-level BPE without merges: a word (with the one space behind it, if any) that is in the vocabulary is
one token, anything else falls back to its UTF-8 bytes. Spaces belong to the word before them, so a value ends
its record as the very token that answers a question.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from sgl_importance.probe.vocabulary import word_pieces

BEGIN = "<|begin|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = (PAD, BEGIN, END, SYSTEM, USER, ASSISTANT)

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

# A word, a number or a run of other signs, each with one space behind it; then any spaces that are left.
_SPLIT = r"\p{L}+ ?|\p{N}+ ?|[^\s\p{L}\p{N}]+ ?|\s"


@cache
def _byte_alphabet() -> tuple[str, ...]:
    """The printable stand-in of each byte value, as every byte-level BPE since GPT-2 writes them."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return tuple(chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(0x100))


def _stand_in(text: str) -> str:
    return "".join(_byte_alphabet()[byte] for byte in text.encode())


@cache
def token_ids() -> dict[str, int]:
    """Token id of every special token and word piece, by its text. Bytes come between the two groups."""
    words_start = len(SPECIAL_TOKENS) + len(_byte_alphabet())
    ids = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    ids.update({piece: words_start + index for index, piece in enumerate(word_pieces())})
    return ids


def vocabulary_size() -> int:
    """Number of tokens: special tokens, 256 bytes, word pieces."""
    return len(token_ids()) + len(_byte_alphabet())


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


_SPECIAL_PATTERN = re.compile(f"({'|'.join(map(re.escape, SPECIAL_TOKENS))})")
# White space spelled out: to `re`, and not to the served tokenizer, the separators 0x1C to 0x1F are some too.
_PLAIN_SPLIT = re.compile(r"[^\W\d_]+ ?|\d+ ?|(?:[^\w \t-\r]|_)+ ?|[ \t-\r]")


def piece_ids(piece: str) -> list[int]:
    """The ids of a piece of text: one for a word of the language, else one for each of its bytes."""
    known = token_ids().get(piece)
    return [len(SPECIAL_TOKENS) + byte for byte in piece.encode()] if known is None else [known]


def encode(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
    """Token ids of a chat as the served tokenizer gives them, without any library; for ASCII text."""
    return encode_text(render(messages, add_generation_prompt))


def encode_text(text: str) -> list[int]:
    """Token ids of a text, special tokens in it included, as ``encode`` gives those of a chat."""
    ids = []
    for part in _SPECIAL_PATTERN.split(text):
        pieces = [part] if part in SPECIAL_TOKENS else _PLAIN_SPLIT.findall(part)
        for piece in pieces:
            ids += piece_ids(piece)
    return ids


def _tokenizer_json() -> dict[str, Any]:
    specials = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    byte_ids = {sign: len(SPECIAL_TOKENS) + index for index, sign in enumerate(_byte_alphabet())}
    words = {_stand_in(piece): index for piece, index in token_ids().items() if piece not in specials}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token, index in specials.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _SPLIT}, "behavior": "Isolated", "invert": False},
                byte_level,
            ],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": specials | byte_ids | words,
            "merges": [],
        },
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "chat_template": CHAT_TEMPLATE,
    }


def write_tokenizer(directory: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json (with the chat template) into `directory`."""
    for name, content in (
        ("tokenizer.json", _tokenizer_json()),
        ("tokenizer_config.json", _tokenizer_config()),
    ):
        text = json.dumps(content, ensure_ascii=False, indent=1)
        (directory / name).write_text(text + "\n", encoding="utf-8")

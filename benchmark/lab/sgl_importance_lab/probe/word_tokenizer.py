"""A tokenizer of a closed language: one token per word of it, one per byte of any other text.

A byte-level BPE without merges: a word (with the one space behind it, if any) that is in the vocabulary is
one token, anything else falls back to its UTF-8 bytes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

BEGIN = "<|begin|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = (PAD, BEGIN, END, SYSTEM, USER, ASSISTANT)

# A word, a number or a run of other signs, each with one space behind it; then any spaces that are left.
_SPLIT = r"\p{L}+ ?|\p{N}+ ?|[^\s\p{L}\p{N}]+ ?|\s"
# White space spelled out: to `re`, and not to the served tokenizer, the separators 0x1C to 0x1F are some too.
_PLAIN_SPLIT = re.compile(r"[^\W\d_]+ ?|\d+ ?|(?:[^\w \t-\r]|_)+ ?|[ \t-\r]")


@cache
def _byte_alphabet() -> tuple[str, ...]:
    """The printable stand-in of each byte value, as every byte-level BPE since GPT-2 writes them."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return tuple(chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(0x100))


def _stand_in(text: str) -> str:
    return "".join(_byte_alphabet()[byte] for byte in text.encode())


@dataclass(frozen=True)
class WordTokenizer:
    """Token ids in this order: special tokens, `marks`, the 256 bytes, `words`."""

    words: tuple[str, ...]
    chat_template: str
    marks: tuple[str, ...] = ()
    """Tokens of their own that stay in a decoded text, such as those around a thought."""

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token id of every special token, mark and word, by its text."""
        ids = {token: index for index, token in enumerate(self._added)}
        words_start = len(ids) + len(_byte_alphabet())
        ids.update({word: words_start + index for index, word in enumerate(self.words)})
        return ids

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self.ids) + len(_byte_alphabet())

    @property
    def _added(self) -> tuple[str, ...]:
        return (*SPECIAL_TOKENS, *self.marks)

    @cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        return re.compile(f"({'|'.join(map(re.escape, self._added))})")

    def piece_ids(self, piece: str) -> list[int]:
        """The ids of a piece of text: one for a word of the language, else one for each of its bytes."""
        known = self.ids.get(piece)
        return [len(self._added) + byte for byte in piece.encode()] if known is None else [known]

    def encode(self, text: str) -> list[int]:
        """Token ids of an ASCII text as the served tokenizer gives them, without any library."""
        ids = []
        for part in self._added_pattern.split(text):
            pieces = [part] if part in self._added else _PLAIN_SPLIT.findall(part)
            for piece in pieces:
                ids += self.piece_ids(piece)
        return ids

    def write(self, directory: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json (with the chat template) into `directory`."""
        for name, content in (
            ("tokenizer.json", self._tokenizer_json()),
            ("tokenizer_config.json", self._tokenizer_config()),
        ):
            text = json.dumps(content, ensure_ascii=False, indent=1)
            (directory / name).write_text(text + "\n", encoding="utf-8")

    def _tokenizer_json(self) -> dict[str, Any]:
        added = {token: index for index, token in enumerate(self._added)}
        byte_ids = {sign: len(added) + index for index, sign in enumerate(_byte_alphabet())}
        words = {_stand_in(word): self.ids[word] for word in self.words}
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        }
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
                    "special": token in SPECIAL_TOKENS,
                }
                for token, index in added.items()
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
                "vocab": added | byte_ids | words,
                "merges": [],
            },
        }

    def _tokenizer_config(self) -> dict[str, Any]:
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "pad_token": PAD,
            "add_bos_token": False,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 32768,
            "chat_template": self.chat_template,
        }

"""Which text is learned from and which is judged: the two never overlap."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

import torch
from tokenizers import Tokenizer

from benchmark.sparse.real.windows import NoText

LEARNED, JUDGED = 0.6, 0.3
"""First and last share of each text; what lies between belongs to neither."""
UNSEEN = ("headers", "service")
"""Kinds of text that nothing is learned from."""


def learned_part(text: str) -> str:
    return text[: int(LEARNED * len(text))]


def judged_part(text: str) -> str:
    return text[len(text) - int(JUDGED * len(text)) :]


def passages(
    tokenizer: Tokenizer, texts: Mapping[str, str], *, tokens: int, count: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tokens of passages to learn from, one of each kind before the second of any.

    Args:
        tokenizer: of the model.
        texts: by kind, whole.
        tokens: of a passage.
        count: passages of each kind.

    Raises:
        NoText: a text is too short.
    """
    for number in range(count):
        for kind, text in texts.items():
            if kind in UNSEEN:
                continue
            part = learned_part(text)
            room = len(part) // count
            start = number * room + random.Random(f"{kind} {number}").randrange(max(1, room // 2))
            ids = tokenizer.encode(part[start : start + 8 * tokens], add_special_tokens=False).ids
            if len(ids) < tokens:
                raise NoText(
                    f"{kind}: passage {number} of {tokens} tokens runs over the end of what is learned"
                )
            yield f"{kind}-{number}", torch.tensor(ids[:tokens])

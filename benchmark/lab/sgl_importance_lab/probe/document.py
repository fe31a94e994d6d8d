"""Documents of the probe language: records of a name and its value, scattered among filler sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from sgl_importance_lab.probe.vocabulary import (
    ADJECTIVES,
    ADVERBS,
    DETERMINERS,
    PLACES,
    PREPOSITIONS,
    RECORD_END,
    SUBJECTS,
    VERBS,
    name_piece,
)

RECORD_TOKENS = 3
_LONGEST_SENTENCE = 11
_OTHER_TEXT_WORDS = (1, 4)

Record = tuple[str, str]


def record_pieces(record: Record) -> list[str]:
    """The tokens of a record, as text: the value right behind its name."""
    name, value = record
    return [name_piece(name), value, RECORD_END]


def filler_sentence(rng: Random) -> list[str]:
    """A random sentence without records, 7 to 11 tokens."""
    words = [rng.choice(DETERMINERS)]
    if rng.random() < 0.5:
        words.append(rng.choice(ADJECTIVES))
    words += [rng.choice(SUBJECTS), rng.choice(VERBS)]
    if rng.random() < 0.4:
        words.append(rng.choice(ADVERBS))
    words += [rng.choice(PREPOSITIONS), rng.choice(DETERMINERS)]
    if rng.random() < 0.4:
        words.append(rng.choice(ADJECTIVES))
    pieces = [word + " " for word in words]
    assert len(pieces) + 2 <= _LONGEST_SENTENCE
    return [*pieces, rng.choice(PLACES), RECORD_END]


def other_text(rng: Random) -> list[str]:
    """A random sentence of made-up words and numbers, which the tokenizer spells byte by byte."""
    signs: list[str] = []
    for index in range(rng.randint(*_OTHER_TEXT_WORDS)):
        syllables = [rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3))]
        number = str(rng.randint(10, 9999))
        word = number if rng.random() < 0.2 else "".join(syllables) + rng.choice("qx")
        signs += [*(" " if index else ""), *word]
    return [*signs, RECORD_END]


@dataclass(frozen=True)
class Layout:
    """The tokens of a document as text, and where each record and sentence starts."""

    pieces: list[str]
    record_offsets: list[int]
    """Token offset of each record, in the order in which the records were given."""
    sentence_offsets: list[int]
    """Token offsets at which a record or a sentence starts, ascending."""


def lay_out(records: Sequence[Record], tokens: int, rng: Random, other_share: float = 0.0) -> Layout:
    """Scatters `records` in random order among filler, in at most `tokens` tokens and at most 10 fewer.

    `other_share` is the share of filler sentences that are other text. Raises ValueError if the records alone
    need more than `tokens`.
    """
    left = tokens - RECORD_TOKENS * len(records)
    if left < 0:
        raise ValueError(f"{len(records)} records do not fit in {tokens} tokens")
    units: list[tuple[int, list[str]]] = [
        (index, record_pieces(record)) for index, record in enumerate(records)
    ]
    while left > 0:
        sentence = other_text(rng) if rng.random() < other_share else filler_sentence(rng)
        if len(sentence) > left:
            if left < _LONGEST_SENTENCE:
                break
            continue
        units.append((-1, sentence))
        left -= len(sentence)
    rng.shuffle(units)
    pieces: list[str] = []
    starts: list[int] = []
    offsets = [0] * len(records)
    for index, unit in units:
        if index >= 0:
            offsets[index] = len(pieces)
        starts.append(len(pieces))
        pieces += unit
    return Layout(pieces, offsets, starts)

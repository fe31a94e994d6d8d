"""Seeded training sequences: chats about a document, with many questions each, and a plain copy task.

Sequence k of a run depends on the seed and k alone, so a resumed run sees what an uninterrupted one would.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from sgl_importance.probe.document import RECORD_TOKENS, Layout, Record, lay_out
from sgl_importance.probe.tokenizer import ASSISTANT, BEGIN, END, SPECIAL_TOKENS, SYSTEM, USER, token_ids
from sgl_importance.probe.vocabulary import (
    INSTRUCTION,
    NAMES,
    QUESTION,
    name_piece,
    training_values,
)

TURN_TOKENS = 4 + len(QUESTION) + 1
_HEAD_TOKENS = 2 + len(INSTRUCTION)
_MOST_QUESTIONS = 64
_LONGEST_POSITION = 32768


@dataclass(frozen=True)
class TrainingSequence:
    """Token ids, their positions, and the indices of those that the model must predict."""

    ids: list[int]
    positions: list[int]
    answers: list[int]
    """Indices of answer tokens: a value, or a repeated token of the copy task."""
    ends: list[int]
    """Indices of end-of-turn tokens."""


def copy_sequence(length: int, symbols: int, rng: Random) -> TrainingSequence:
    """A random block repeated until `length`, drawn from `symbols` of the word tokens; 0 for all."""
    words = [index for piece, index in token_ids().items() if piece not in SPECIAL_TOKENS]
    alphabet = words[:: max(1, len(words) // symbols)] if symbols else words
    period = rng.randint(4, max(5, min(length // 2, 256)))
    block = [rng.choice(alphabet) for _ in range(period)]
    ids = [token_ids()[BEGIN], *(block[index % period] for index in range(length - 1))]
    return TrainingSequence(ids, list(range(length)), list(range(period + 2, length)), [])


def draw_training_records(count: int, rng: Random) -> list[Record]:
    """`count` records with distinct names, none of them a held-out pairing."""
    return [(name, rng.choice(training_values(name))) for name in rng.sample(NAMES, count)]


def _stretched(positions: list[int], starts: list[int], rng: Random) -> list[int]:
    """Opens up to three gaps between sentences, so that distances beyond the training length are seen."""
    spare = rng.randint(0, _LONGEST_POSITION - len(positions))
    cuts = sorted(rng.choice(starts) for _ in range(3))
    shares = sorted(rng.randint(0, spare) for _ in range(3))
    shifted = list(positions)
    for cut, gap in zip(cuts, (shares[0], shares[1] - shares[0], shares[2] - shares[1]), strict=True):
        for index in range(cut, len(shifted)):
            shifted[index] += gap
    return shifted


def chat_sequence(length: int, rng: Random, stretch: bool) -> TrainingSequence:
    """A chat of at most `length` tokens: a document, then a run of questions about distinct records of it."""
    room = length - _HEAD_TOKENS
    most = min(len(NAMES), room // (RECORD_TOKENS + TURN_TOKENS))
    if length > 128 and rng.random() < 0.5:
        count = round(most ** rng.random())
    else:
        count = max(2, round(most * rng.uniform(0.2, 1.0)))
    turns = min(count, _MOST_QUESTIONS)
    room -= turns * TURN_TOKENS
    assert room >= RECORD_TOKENS * count, f"a chat does not fit in {length} tokens"
    records = draw_training_records(count, rng)
    layout = lay_out(records, room, rng)
    return _chat(layout, records, turns, rng, stretch)


def _chat(layout: Layout, records: list[Record], turns: int, rng: Random, stretch: bool) -> TrainingSequence:
    form = rng.random()
    if form < 0.5:
        pieces = [BEGIN, SYSTEM, *INSTRUCTION, USER]
    elif form < 0.75:
        pieces = [BEGIN, SYSTEM, *INSTRUCTION]
    else:
        pieces = [BEGIN, USER]
    document_start = len(pieces)
    pieces += layout.pieces
    if 0.5 <= form < 0.75:
        pieces.append(USER)
    asked = rng.sample(records, min(turns, len(records)))
    answers, ends = [], []
    for turn, (name, value) in enumerate(asked):
        if turn:
            pieces.append(USER)
        pieces += [*QUESTION, name_piece(name), ASSISTANT]
        answers.append(len(pieces))
        ends.append(len(pieces) + 1)
        pieces += [value, END]
    table = token_ids()
    positions = list(range(len(pieces)))
    if stretch:
        positions = _stretched(positions, [document_start + start for start in layout.sentence_offsets], rng)
    return TrainingSequence([table[piece] for piece in pieces], positions, answers, ends)

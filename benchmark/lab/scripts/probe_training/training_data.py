"""Seeded training sequences: chats about a document, with many questions each, and a plain copy task.

Sequence k of a run depends on the seed and k alone, so a resumed run sees what an uninterrupted one would.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from sgl_importance_lab.probe.document import RECORD_TOKENS, Layout, Record, lay_out
from sgl_importance_lab.probe.tokenizer import (
    ASSISTANT,
    BEGIN,
    END,
    SPECIAL_TOKENS,
    SYSTEM,
    USER,
    piece_ids,
    token_ids,
    vocabulary_size,
)
from sgl_importance_lab.probe.vocabulary import (
    INSTRUCTION,
    NAMES,
    QUESTION,
    name_piece,
    training_values,
    word_pieces,
)

_LONGEST_QUESTION = len(QUESTION) + 3
_TURN_TOKENS = 4 + _LONGEST_QUESTION
_HEAD_TOKENS = 2 + len(INSTRUCTION)
_MOST_QUESTIONS = 64
_LONGEST_PERIOD = 1024
_LONGEST_POSITION = 32768
_VARIED_FROM = 128
"""Context length above which chats vary in density, wording of the question and filler."""


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
    """A random block repeated until `length`, drawn from `symbols` of the word tokens.

    With `symbols` 0 the block has distinct tokens of the whole vocabulary, bytes included: what follows a
    token is then never in doubt.
    """
    tokens = list(range(len(SPECIAL_TOKENS), vocabulary_size()))
    alphabet = rng.sample(tokens, len(tokens))
    if symbols:
        words = tokens[-len(word_pieces()) :]
        alphabet = words[:: len(words) // symbols]
    period = rng.randint(4, max(5, min(length // 2, _LONGEST_PERIOD)))
    block = rng.choices(alphabet, k=period) if symbols else alphabet[:period]
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


def _question(name: str, varied: bool, rng: Random) -> list[str]:
    draw = rng.random() if varied else 1.0
    if draw < 0.1:
        return [name_piece(name)]
    if draw < 0.2:
        return [*QUESTION, name_piece(name), "?", " "]
    return [*QUESTION, name_piece(name)]


def chat_sequence(length: int, rng: Random, stretch: bool) -> TrainingSequence:
    """A chat of at most `length` tokens: a document, then a run of questions about distinct records of it.

    Above 128 tokens chats vary: sparse documents, text from outside the language among the filler, other
    wordings of the question.
    """
    varied = length > _VARIED_FROM
    room = length - _HEAD_TOKENS
    most = min(len(NAMES), room // (RECORD_TOKENS + _TURN_TOKENS))
    if varied and rng.random() < 0.5:
        count = round(most ** rng.random())
    else:
        count = max(2, round(most * rng.uniform(0.2, 1.0)))
    turns = min(count, _MOST_QUESTIONS)
    room -= turns * _TURN_TOKENS
    assert room >= RECORD_TOKENS * count, f"a chat does not fit in {length} tokens"
    records = draw_training_records(count, rng)
    other_share = rng.uniform(0.0, 0.5) if varied and rng.random() < 0.25 else 0.0
    layout = lay_out(records, room, rng, other_share)
    return _chat(layout, rng.sample(records, turns), varied, stretch, rng)


def _chat(layout: Layout, asked: list[Record], varied: bool, stretch: bool, rng: Random) -> TrainingSequence:
    """The document in the system or first user message, then one turn for each record asked."""
    form = rng.random()
    in_system = 0.5 <= form < 0.75
    pieces = [BEGIN, SYSTEM, *INSTRUCTION] if form < 0.75 else [BEGIN]
    if not in_system:
        pieces.append(USER)
    document_start = len(pieces)
    pieces += layout.pieces
    if in_system:
        pieces.append(USER)
    answers, ends = [], []
    for turn, (name, value) in enumerate(asked):
        if turn:
            pieces.append(USER)
        pieces += [*_question(name, varied, rng), ASSISTANT]
        answers.append(len(pieces))
        ends.append(len(pieces) + 1)
        pieces += [value, END]
    positions = list(range(len(pieces)))
    if stretch:
        positions = _stretched(positions, [document_start + start for start in layout.sentence_offsets], rng)
    ids = [index for piece in pieces for index in piece_ids(piece)]
    assert len(ids) == len(pieces)
    return TrainingSequence(ids, positions, answers, ends)

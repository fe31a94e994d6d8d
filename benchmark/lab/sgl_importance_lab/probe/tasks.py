"""Retrieval tasks with exact answers; every record pairs a name with a value never paired in training.

`single-needle` hides one record in filler and some text from outside the language; `multi-key-needle` hides
many, and the question names one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from random import Random

from sgl_importance_lab.probe.document import RECORD_TOKENS, Layout, Record, lay_out
from sgl_importance_lab.probe.tokenizer import ASSISTANT, BEGIN, SYSTEM, USER
from sgl_importance_lab.probe.vocabulary import (
    INSTRUCTION,
    NAMES,
    QUESTION,
    UNSEEN_NAMES,
    VALUES,
    held_out_values,
)

TASKS = ("single-needle", "multi-key-needle")

_TOKENS_PER_RECORD = 24
_OTHER_SHARE = 0.1
_MOST_RECORDS = 200
_PREFIX_PIECES = (BEGIN, SYSTEM, *INSTRUCTION, USER)
_QUESTION_PIECES = (*QUESTION, "", ASSISTANT)
SHORTEST_PROMPT = len(_PREFIX_PIECES) + len(_QUESTION_PIECES) + 2 * _TOKENS_PER_RECORD

Message = dict[str, str]


def system_message() -> Message:
    """The instruction that every prompt starts with."""
    return {"role": "system", "content": "".join(INSTRUCTION).strip()}


def question_text(name: str) -> str:
    """The question whose answer is the value of `name`."""
    return "".join(QUESTION) + name


@dataclass(frozen=True)
class Span:
    """Half-open range [start, end)."""

    start: int
    end: int


@dataclass(frozen=True)
class ProbeDocument:
    """A text with records scattered in it; several questions can be asked about one document."""

    layout: Layout
    record_list: tuple[Record, ...]

    @cached_property
    def text(self) -> str:
        return "".join(self.layout.pieces).strip()

    @cached_property
    def records(self) -> Mapping[str, str]:
        """Value by name."""
        return dict(self.record_list)

    @property
    def tokens(self) -> int:
        """Length of the document in tokens of the probe's tokenizer."""
        return len(self.layout.pieces)

    def question(self, name: str) -> str:
        """The question that the value of `name` answers; KeyError when the document has no such record."""
        if name not in self.records:
            raise KeyError(name)
        return question_text(name)

    def messages(self, name: str) -> list[Message]:
        """The instruction, then the document with the question about `name` behind it."""
        return [system_message(), {"role": "user", "content": f"{self.text} {self.question(name)}"}]

    def token_span(self, name: str) -> Span:
        """Tokens of the record of `name` (name, value, end) within the document."""
        index = [record_name for record_name, _ in self.record_list].index(name)
        start = self.layout.record_offsets[index]
        return Span(start, start + RECORD_TOKENS)


@dataclass(frozen=True)
class ProbeTask:
    """One prompt with its only right answer."""

    task: str
    messages: list[Message]
    answer: str
    name: str
    unseen_name: bool
    """Whether the asked name was never the name of a record in training."""
    prompt_tokens: int
    """Prompt length under the probe's chat template, special tokens and generation prompt included."""


def _draw_records(names: list[str], rng: Random) -> tuple[Record, ...]:
    return tuple((name, rng.choice(held_out_values(name))) for name in names)


def _record_count(tokens: int) -> int:
    return max(2, min(_MOST_RECORDS, tokens // _TOKENS_PER_RECORD))


def make_document(length: int, seed: int) -> ProbeDocument:
    """A document of at most `length` tokens and at most 10 fewer, with about one record per 24 tokens.

    Every pairing is held out of training; names are those that training pairs with other values.
    """
    if length < 2 * _TOKENS_PER_RECORD:
        raise ValueError(f"a document needs at least {2 * _TOKENS_PER_RECORD} tokens, not {length}")
    rng = Random(f"document/{length}/{seed}")
    records = _draw_records(rng.sample(NAMES, _record_count(length)), rng)
    return ProbeDocument(lay_out(records, length, rng), records)


def make_task(task: str, length: int, seed: int, unseen_name: bool = False) -> ProbeTask:
    """The task's prompt number `seed`, at most `length` tokens and at most 10 fewer.

    With `unseen_name` the question names one that training never paired with any value. Raises ValueError
    for an unknown task or a length under `SHORTEST_PROMPT`.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}: choose from {', '.join(TASKS)}")
    if length < SHORTEST_PROMPT:
        raise ValueError(f"a prompt needs at least {SHORTEST_PROMPT} tokens, not {length}")
    rng = Random(f"{task}/{length}/{seed}/{unseen_name}")
    tokens = length - len(_PREFIX_PIECES) - len(_QUESTION_PIECES)
    count = 1 if task == "single-needle" else _record_count(tokens)
    needle = rng.choice(UNSEEN_NAMES if unseen_name else NAMES)
    others = rng.sample([name for name in NAMES if name != needle], count - 1)
    if unseen_name:
        needle_value = rng.choice(VALUES)
        records = ((needle, needle_value), *_draw_records(others, rng))
    else:
        records = _draw_records([needle, *others], rng)
    layout = lay_out(records, tokens, rng, _OTHER_SHARE if task == "single-needle" else 0.0)
    document = ProbeDocument(layout, records)
    return ProbeTask(
        task=task,
        messages=document.messages(needle),
        answer=document.records[needle],
        name=needle,
        unseen_name=unseen_name,
        prompt_tokens=len(_PREFIX_PIECES) + len(layout.pieces) + len(_QUESTION_PIECES),
    )

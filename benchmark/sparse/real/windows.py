"""Windows of real text with records planted in them, and what is asked behind them."""

from __future__ import annotations

import importlib.metadata
import json
import random
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer

from benchmark.sparse.real.layouts import LAYOUTS, Planted, Text, inserted

PLACES = (
    *("Oslo", "Lima", "Cairo", "Quito", "Hanoi", "Minsk", "Turin", "Perth", "Dakar", "Kyoto", "Sofia"),
    *("Bergen", "Havana", "Lisbon", "Nairobi", "Warsaw", "Dublin", "Athens"),
)
RECORDS, QUOTES = 6, 2
QUOTED_CUE, QUOTED_SCORED, PLAIN_SCORED = 16, 12, 24
"""Tokens of a passage that are quoted exactly, of what follows there, and of ordinary text."""
MOST_CHARACTERS = 4_000_000
LEAST_STRING = 40
"""Characters of a string in JSON that is text, and no name or number."""


class NoText(ValueError):
    """A kind of text is missing or too short; the message names it."""


@dataclass(frozen=True)
class Task:
    """What is asked behind a window.

    Attributes:
        kind: ``plain`` (the text goes on), ``quoted`` (a passage of it stands there again) or ``record``.
        cue: tokens that are computed exactly, but for the last, which predicts the first scored one.
        scored: tokens whose distributions are compared.
    """

    kind: str
    cue: tuple[int, ...]
    scored: tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """Text of whole pages, and its tasks; the layout of its records is one of ``LAYOUTS``."""

    source: str
    number: int
    tokens: torch.Tensor
    tasks: tuple[Task, ...]
    layout: str = "spread"


def default_texts() -> dict[str, str]:
    """Kinds of text that a Linux machine with Python has, by name; kinds that it lacks are left out."""
    standard = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    headers = sorted(Path("/usr/include").glob("*.h"))
    licences = sorted(path for path in Path("/usr/share/common-licenses").glob("*") if path.is_file())
    packages = sorted(importlib.metadata.distributions(), key=lambda package: package.name.lower())
    readmes = [str(package.metadata.get_payload()) for package in packages]
    found = {
        "python": _joined(path.read_text(errors="replace") for path in standard),
        "reference": _joined(topics[topic] for topic in sorted(topics)),
        "licences": _joined(path.read_text(errors="replace") for path in licences),
        "headers": _joined(path.read_text(errors="replace") for path in headers),
        "readmes": _joined(dict.fromkeys(readmes)),
    }
    return {name: text for name, text in found.items() if text}


def text_at(path: Path) -> str:
    """The text of a file, or of the files of a folder, one behind the other.

    Raises:
        NoText: nothing can be read there.
    """
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    text = _joined(_text_of(file) for file in files if file.is_file())
    if not text:
        raise NoText(f"no text in {path}")
    return text


def _text_of(file: Path) -> str:
    text = file.read_text(errors="replace")
    if file.suffix not in (".json", ".jsonl"):
        return text
    # Of JSON the strings that somebody wrote, in their order: transcripts, questions.
    lines = text.splitlines() if file.suffix == ".jsonl" else [text]
    return "\n".join(string for line in lines if line.strip() for string in _strings(json.loads(line)))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str) and len(value) >= LEAST_STRING:
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def _joined(parts: Iterable[str]) -> str:
    text: list[str] = []
    size = 0
    for part in parts:
        if size >= MOST_CHARACTERS:
            break
        text.append(part[: MOST_CHARACTERS - size])
        size += len(text[-1])
    return "\n\n".join(text)


def make_windows(
    tokenizer: Tokenizer,
    name: str,
    text: str,
    *,
    tokens: int,
    count: int,
    page_size: int,
    layout: str = "spread",
) -> list[Window]:
    """Windows spread over a text, each with records, the passages that are quoted again, and what follows.

    Raises:
        NoText: the text is too short for so many.
    """
    draws = random.Random(f"{name} {tokens}")
    room = len(text) // count
    needed = 12 * tokens  # no text has more characters a token
    if room < needed // 3:
        raise NoText(f"{name}: {len(text)} characters are too few for {count} windows of {tokens} tokens")
    windows = []
    for number in range(count):
        start = number * room + draws.randrange(max(1, room - needed))
        start = text.find("\n", start) + 1
        # What the model wants before every text (Gemma: a token), or nothing.
        ids = tokenizer.encode(text[start : start + needed]).ids
        if len(ids) < tokens + PLAIN_SCORED:
            raise NoText(f"{name}: window {number} of {tokens} tokens runs over the end of the text")
        size = tokens // page_size * page_size
        windows.append(
            _window(tokenizer, name, number, ids, size=size, page_size=page_size, layout=layout, draws=draws)
        )
    return windows


def _window(
    tokenizer: Tokenizer,
    name: str,
    number: int,
    ids: list[int],
    *,
    size: int,
    page_size: int,
    layout: str,
    draws: random.Random,
) -> Window:
    def encoded(string: str) -> list[int]:
        return list(tokenizer.encode(string, add_special_tokens=False).ids)

    secrets = {place: draws.randrange(1000, 10000) for place in draws.sample(PLACES, RECORDS)}
    questions = {place: f"The secret number of {place} is" for place in secrets}
    planted = [
        Planted(
            encoded(f"{questions[place]} {secret}.\n"),
            len(encoded(questions[place])),
            encoded(f"Few people know the secret number of {place}.\n"),
        )
        for place, secret in secrets.items()
    ]
    line_ends = [at + 1 for at, token in enumerate(ids) if "\n" in tokenizer.decode([token])]
    text = Text(ids, line_ends, size, page_size)
    whole, is_planted = inserted(text, LAYOUTS[layout](text, planted, draws))
    # The last token of the context is the cue of what follows, so that the context is of whole pages.
    tasks = [Task("plain", (whole[size],), tuple(whole[size + 1 : size + 1 + PLAIN_SCORED]))]
    quoted = QUOTED_CUE + QUOTED_SCORED
    before_text = len(tokenizer.encode("").ids)
    starts = [at for at in range(before_text, int(0.7 * size)) if not any(is_planted[at : at + quoted])]
    for at in draws.sample(starts, QUOTES):
        cue = [*encoded("\n\n"), *whole[at : at + QUOTED_CUE]]
        tasks.append(Task("quoted", tuple(cue), tuple(whole[at + QUOTED_CUE : at + quoted])))
    for place, secret in secrets.items():
        tasks.append(Task("record", tuple(encoded(f"\n{questions[place]}")), tuple(encoded(f" {secret}"))))
    return Window(name, number, torch.tensor(whole[:size]), tuple(tasks), layout)

"""Conversations as users have them: coding-agent sessions and dialogues, or a stand-in of the same shape."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path

SESSIONS, SESSION_TURNS = 3, 5
DIALOGUES, DIALOGUE_TURNS = 4, 4
# The probe's tokenizer makes about one token of each byte, so every turn is cut to a part of itself.
FIRST_TURN_CHARACTERS, TURN_CHARACTERS = 1500, 500

Messages = list[dict[str, str]]


def data_folder() -> Path | None:
    """``shared/data`` beside the checkout or beside a folder above it, or what SGL_IMPORTANCE_DATA names."""
    if named := os.environ.get("SGL_IMPORTANCE_DATA"):
        return Path(named)
    candidates = (parent / "shared" / "data" for parent in Path(__file__).resolve().parents)
    return next((folder for folder in candidates if folder.is_dir()), None)


def sessions() -> list[list[str]]:
    """Prompts of coding-agent sessions: each continues the one before."""
    folder = data_folder()
    files = sorted((folder / "agents" / "miniswe").glob("*.jsonl")) if folder else []
    texts = (_growing([json.loads(line)["input"] for line in file.open()]) for file in files)
    chosen = list(islice((_cut(session) for session in texts if len(session) == SESSION_TURNS), SESSIONS))
    return chosen if len(chosen) == SESSIONS else [_made_up_session(seed) for seed in range(SESSIONS)]


def dialogues() -> list[Messages]:
    """Dialogues of several turns, ``user`` and ``assistant`` by turns, ``user`` last."""
    folder = data_folder()
    file = folder / "prompts" / "mtbench101.jsonl" if folder else None
    if file is None or not file.is_file():
        return [_made_up_dialogue(seed) for seed in range(DIALOGUES)]
    with file.open() as lines:
        histories = (json.loads(line)["history"] for line in lines)
        long_ones = (history for history in histories if len(history) >= DIALOGUE_TURNS)
        return [_messages(history[:DIALOGUE_TURNS]) for history in islice(long_ones, DIALOGUES)]


def turns_of(dialogue: Messages) -> Iterator[Messages]:
    """The requests of a dialogue: everything up to each message of the user."""
    for end, message in enumerate(dialogue, start=1):
        if message["role"] == "user":
            yield dialogue[:end]


def _growing(inputs: list[str]) -> list[str]:
    """The first inputs that each continue the one before and add to it."""
    chain = inputs[:1]
    for text in inputs[1:]:
        if len(chain) < SESSION_TURNS and text.startswith(chain[-1]) and text != chain[-1]:
            chain.append(text)
    return chain


def _cut(session: list[str]) -> list[str]:
    text = session[0][:FIRST_TURN_CHARACTERS]
    turns = [text]
    for before, after in pairwise(session):
        text += after[len(before) :][:TURN_CHARACTERS]
        turns.append(text)
    return turns


def _messages(history: list[dict[str, str]]) -> Messages:
    messages: Messages = []
    for turn in history:
        messages.append({"role": "user", "content": turn["user"][:TURN_CHARACTERS]})
        messages.append({"role": "assistant", "content": turn["bot"][:TURN_CHARACTERS]})
    return messages[:-1]


def _sentences(rng: random.Random, characters: int) -> str:
    words = "the test fails in line of file because value is not what function returns so we read and run it"
    text = ""
    while len(text) < characters:
        text += " ".join(rng.choices(words.split(), k=rng.randint(4, 12))) + ".\n"
    return text[:characters]


def _made_up_session(seed: int) -> list[str]:
    rng = random.Random(seed)
    text, turns = _sentences(rng, FIRST_TURN_CHARACTERS), []
    for _ in range(SESSION_TURNS):
        turns.append(text)
        text += _sentences(rng, TURN_CHARACTERS)
    return turns


def _made_up_dialogue(seed: int) -> Messages:
    rng = random.Random(seed)
    turns = range(DIALOGUE_TURNS)
    return _messages([{"user": _sentences(rng, 200), "bot": _sentences(rng, 400)} for _ in turns])

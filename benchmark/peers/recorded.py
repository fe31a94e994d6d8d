"""Public recordings of agents, in a model's tokens: prompts that grow turn by turn."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

TURNS = 30
SERVICE_SESSIONS = 60

Ids = list[int]
Session = list[Ids]


@dataclass(frozen=True)
class Cut:
    """A session whose prompts are at most so long.

    Attributes:
        left_out: prompts that came later, and are not sent.
    """

    prompts: Session
    left_out: int


def cut(prompts: Sequence[Ids], longest: int) -> Cut:
    """A session up to the turn that would pass ``longest`` tokens."""
    kept = next((turn for turn, prompt in enumerate(prompts) if len(prompt) > longest), len(prompts))
    return Cut(list(prompts[:kept]), len(prompts) - kept)


def coding(data: Path, tokenizer: Tokenizer) -> Iterator[Session]:
    """Coding agents (miniswe), each at most ``TURNS`` turns."""
    for file in sorted((data / "agents" / "miniswe").glob("*.jsonl")):
        rows = sorted(map(json.loads, file.read_text().splitlines()), key=lambda row: row["timestamp"])
        yield [tokenizer.encode(row["input"], add_special_tokens=False).ids for row in rows[:TURNS]]


def service(data: Path, tokenizer: Tokenizer) -> Iterator[Session]:
    """Customer service behind one instruction: each answer's prompt is all that was said before it."""
    for recorded in json.loads((data / "agents" / "tau_bench_airline.json").read_text())[:SERVICE_SESSIONS]:
        prompts: Session = []
        said: Ids = []
        for message in recorded["traj"]:
            if message["role"] == "assistant":
                prompts.append(list(said))
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            text = f"{message['role']}: {message.get('content') or ''}{json.dumps(calls) if calls else ''}\n"
            said += tokenizer.encode(text, add_special_tokens=False).ids
        yield prompts[:TURNS]

"""The load of the demonstration: coding agents that read this repository's own files, turn by turn.

Every word is of this checkout, so the load is licensed as it is. Which agent goes on is drawn with a seed:
five are at work at a time, one of them waits long for its tools, and who has answered closes its session.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ALIVE = 5
LINES = 22
"""Of a file that one call of a tool shows."""
SYSTEM = """You are a coding agent that answers questions about the Python package sgl_importance. You never
guess: read what you need first. Answer each turn with exactly one call of a tool, as one line of JSON.
Tools:
- {"tool": "read", "path": "...", "from": 1} shows 22 lines of a file.
- {"tool": "grep", "pattern": "..."} shows the lines of the package that match a regular expression.
- {"tool": "answer", "text": "..."} ends your work with one paragraph of plain English.
Quote names as they are written. Say where each thing stands, as path:line. Be short."""
TASKS = (
    ("errors.py", "Which class do all errors of the package derive from, and why is there one?"),
    ("tiers.py", "Which tiers of memory are there, and how are they ordered?"),
    ("json_text.py", "How is JSON read that a client has written?"),
    ("interface.py", "What does a producer of page scores hand over?"),
    ("reuse/answer_end.py", "How can an answer end, and who needs to know?"),
    ("reuse/calibration.py", "What does the calibration of predicted reuse compare?"),
    ("policy/cost_model.py", "What does it cost to compute a page again?"),
    ("policy/marginal_loss.py", "How is the loss of evicting a node defined?"),
    ("nodes/digests.py", "How is the digest of a page made?"),
    ("nodes/ghosts.py", "What is remembered of a page that was evicted?"),
    ("signal/fold.py", "How do page scores come onto nodes?"),
    ("misses/reason.py", "For which reasons are tokens of a prompt not found?"),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of an agent.

    Attributes:
        session: name of the agent's session.
        messages: the whole conversation so far, as chats are sent.
        is_last: whether the session is over behind its answer.
    """

    session: str
    messages: list[dict[str, str]]
    is_last: bool


def load(seed: int = 0) -> Iterator[Turn]:
    """All turns in the order in which they are sent, one behind the other."""
    rng = Random(seed)
    waiting = [list(_turns(number, path, task)) for number, (path, task) in enumerate(TASKS)]
    working, waiting = waiting[:ALIVE], waiting[ALIVE:]
    while working:
        # The first at work waits for long tools: it comes back a quarter as often as the others.
        chosen = rng.choices(working, [0.25, *[1] * (ALIVE - 1)][: len(working)])[0]
        yield chosen.pop(0)
        if not chosen:
            working.remove(chosen)
            working += waiting[:1]
            waiting = waiting[1:]


def _turns(number: int, path: str, task: str) -> Iterator[Turn]:
    lines = (ROOT / "sgl_importance" / path).read_text().splitlines()
    parts = [lines[start : start + LINES] for start in range(0, len(lines), LINES)][: 2 + number % 3]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{path}: {task}"}]
    for count, part in enumerate([*parts, []]):
        yield Turn(f"agent-{number}", list(messages), is_last=count == len(parts))
        call: dict[str, Any] = {"tool": "read", "path": path, "from": 1 + count * LINES}
        messages += [
            {"role": "assistant", "content": json.dumps(call)},
            {"role": "user", "content": shown(part)},
        ]


def shown(lines: Sequence[str]) -> str:
    """What the tool answers."""
    return "\n".join(lines)

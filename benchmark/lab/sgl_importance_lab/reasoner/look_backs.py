"""How far the right thoughts of a set of tasks look back: planted, and so known exactly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sgl_importance_lab.reasoner.tasks import ReasoningTask

BOUNDS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Upper ends of the table's columns, tokens."""


@dataclass(frozen=True)
class LookBackRow:
    """How many tokens of one kind had to be read from how far back in the thought, in all and per thought."""

    task: str
    kind: str
    n: int
    """Thoughts."""
    per_thought: float
    up_to: dict[str, int]
    """Number of look-backs by distance in tokens: each key is an upper end, and `more` is beyond the last."""


def look_back_table(tasks: Iterable[ReasoningTask]) -> list[LookBackRow]:
    """One row for each task and kind of look-back, in order of appearance.

    The distance is that to the nearest token that says what is read: the latest mention. What a step reads of
    its prompt counts for nothing here.
    """
    distances: dict[tuple[str, str], list[int]] = {}
    thoughts: dict[str, int] = {}
    for task in tasks:
        thoughts[task.task] = thoughts.get(task.task, 0) + 1
        for look_back in task.solution.thought.look_backs:
            distances.setdefault((task.task, look_back.kind), []).append(look_back.distance)
    return [
        LookBackRow(name, kind, thoughts[name], len(found) / thoughts[name], _histogram(found))
        for (name, kind), found in distances.items()
    ]


def _histogram(distances: list[int]) -> dict[str, int]:
    counts = {str(bound): 0 for bound in BOUNDS} | {"more": 0}
    for distance in distances:
        counts[next((str(bound) for bound in BOUNDS if distance <= bound), "more")] += 1
    return counts

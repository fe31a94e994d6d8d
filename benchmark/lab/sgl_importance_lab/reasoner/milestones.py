"""Which tokens of a right thought state what later steps need, and which phase each step is of."""

from __future__ import annotations

from collections.abc import Iterator

from sgl_importance_lab.reasoner.thought import Thought

_HEADER_TOKENS = 4
PHASE_OF_STEP = {
    "visit": "explore",
    "line": "explore",
    "back": "verify",
    "goal": "conclude",
    "path": "conclude",
    "state": "conclude",
    "answer": "conclude",
}
"""A step back reads a record once more and checks that each neighbour was seen: it verifies a dead end."""


def milestones(thought: Thought) -> list[int]:
    """Indices of the tokens that state a value (of a line: its target's), a push or a pop.

    Of `visit Bea from Ada` and `back Ada from none`, the two names; the words between them say nothing.
    """
    found = []
    ends = [*thought.step_starts[1:], len(thought.pieces)]
    for start, end, step in zip(thought.step_starts, ends, thought.steps, strict=True):
        if step.kind in ("visit", "back"):
            found += [start + 1, start + _HEADER_TOKENS - 1]
        elif step.kind == "line":
            found += [end - 3, end - 2]
    return found


def phases(thought: Thought) -> Iterator[tuple[str, int, int]]:
    """Phase, first token and end of each step."""
    ends = [*thought.step_starts[1:], len(thought.pieces)]
    for start, end, step in zip(thought.step_starts, ends, thought.steps, strict=True):
        yield PHASE_OF_STEP[step.kind], start, end

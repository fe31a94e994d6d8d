"""Which step of a thought is the first wrong one."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_importance_lab.reasoner.tasks import read_prompt


@dataclass(frozen=True)
class WrongStep:
    """Step `number` (from 0) of a thought, as words; `got` is empty where the thought ends before it."""

    number: int
    kind: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"step {self.number} ({self.kind}) is '{self.got}', not '{self.expected}'"


@dataclass(frozen=True)
class Verdict:
    """How far a thought is right. Its steps are those of the only right thought."""

    steps: int
    right_steps: int
    """Steps before the first wrong one."""
    first_wrong: WrongStep | None
    """None for a thought that is right to its end."""

    @property
    def share_right(self) -> float:
        return self.right_steps / self.steps


def verify(prompt: str, thought: str) -> Verdict:
    """Compares a thought (without marks) with the right one about `prompt`, step by step.

    Raises BadPrompt for a prompt that states no problem.
    """
    steps = read_prompt(prompt).solve().thought.steps
    words = thought.split()
    place = 0
    for number, step in enumerate(steps):
        expected = [piece.strip() for piece in step.pieces]
        got = words[place : place + len(expected)]
        if got != expected:
            wrong = WrongStep(number, step.kind, " ".join(expected), " ".join(got))
            return Verdict(len(steps), number, wrong)
        place += len(expected)
    if place < len(words):
        wrong = WrongStep(len(steps), "end of thought", "", " ".join(words[place:]))
        return Verdict(len(steps), len(steps), wrong)
    return Verdict(len(steps), len(steps), None)

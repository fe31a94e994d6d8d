"""What the reasoner is trained on, step by step: short thoughts first, longer ones when those are right.

Each skill goes up its own ladder of lengths. The model starts from the retrieval model's weights, which bring
the circuit that everything here is built from: attention that finds what came behind this token before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from reasoner_training.training_data import ReasoningSequence, reasoning_sequence
from sgl_importance_lab.reasoner.tasks import draw_task

SKILLS: Mapping[str, Mapping[str, float]] = {
    "search": {"search": 0.7, "state": 0.3},
    "program": {"program": 1.0},
}
"""Tasks that go up the ladder together, and the share of each.

The second skill is begun when the first is at its longest thoughts.
"""

_SMOOTHING = 0.1
"""Weight of one step in the running share of right replies."""
_STRETCHED_SHARE = 0.25
_SHORTER_SHARE = 0.3


@dataclass(frozen=True)
class Plan:
    """Lengths of thoughts, tokens, ascending; a skill goes on to the next when `target` replies are right."""

    lengths: Sequence[int]
    target: float = 0.5
    thinks: bool = True
    sequences_per_step: int = 8
    tokens_per_step: int = 4096
    """At most, where that leaves one sequence at least."""
    learning_rate: float = 1e-3
    warm_up_steps: int = 50
    last_rate: float = 0.02
    """Share of the learning rate at the end of its fall."""


def full_plan(longest: int = 1024, thinks: bool = True) -> Plan:
    """The plan of the committed checkpoint, and without `thinks` that of its control."""
    ladder = (48, 96, 160, 256, 384, 512, 768, 1024, 1536, 2048)
    return Plan(tuple(length for length in ladder if length <= longest), thinks=thinks)


def smoke_plan(thinks: bool = True) -> Plan:
    """A few small steps; the model that comes out has learnt nothing."""
    return Plan((48, 64), target=-1.0, thinks=thinks, sequences_per_step=2)


@dataclass
class Curriculum:
    """Where a run stands in its plan. Its state is plain data, saved with the weights."""

    plan: Plan
    seed: int
    step: int = 0
    level: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SKILLS, 0))
    """Index of the length that each skill is at."""
    right: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SKILLS, 0.0))
    """Running share of right replies of each skill at its length."""
    history: list[dict[str, Any]] = field(default_factory=list)
    fall_start: int | None = None
    """Step at which the learning rate began to fall."""
    fall_steps: int = 0

    def state(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "plan"}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def begin_fall(self, steps: int) -> None:
        """Lets the learning rate fall from here for so many steps; then the run is finished."""
        self.fall_start, self.fall_steps = self.step, steps

    @property
    def finished(self) -> bool:
        return self.fall_start is not None and self.step >= self.fall_start + self.fall_steps

    def learning_rate(self) -> float:
        """Warm-up, then constant, then a half cosine."""
        rate = self.plan.learning_rate * min(1.0, (self.step + 1) / self.plan.warm_up_steps)
        if self.fall_start is None:
            return rate
        done = min(1.0, (self.step - self.fall_start) / self.fall_steps)
        last = self.plan.last_rate
        return rate * (last + (1 - last) * (1 + math.cos(math.pi * done)) / 2)

    def batch(self) -> tuple[str, int, list[ReasoningSequence]]:
        """The skill of this step, the index of its length, and its sequences.

        Depends on seed, step and levels alone.
        """
        rng = Random(f"training/{self.seed}/{self.step}")
        first, second = SKILLS
        both = not self.plan.thinks or self.level[first] + 1 == len(self.plan.lengths)
        skill = rng.choice((first, second)) if both else first
        level = self.level[skill]
        # An answer without a thought is not learnt step by step: the control sees all lengths from the start.
        if not self.plan.thinks:
            level = rng.randrange(len(self.plan.lengths))
        elif level and rng.random() < _SHORTER_SHARE:
            level = rng.randrange(level)
        tasks = SKILLS[skill]
        sequences: list[ReasoningSequence] = []
        longest = 0
        while len(sequences) < self.plan.sequences_per_step:
            (task,) = rng.choices(list(tasks), list(tasks.values()))
            drawn = draw_task(task, self.plan.lengths[level], rng)
            stretch = rng if rng.random() < _STRETCHED_SHARE else None
            sequence = reasoning_sequence(drawn, self.plan.thinks, stretch)
            longest = max(longest, len(sequence.ids))
            if sequences and longest * (len(sequences) + 1) > self.plan.tokens_per_step:
                break
            sequences.append(sequence)
        return skill, level, sequences

    def advance(self, skill: str, level: int, right: float) -> bool:
        """Counts the step that `batch` described; True when the skill goes on to longer thoughts."""
        self.step += 1
        if level != self.level[skill] or not self.plan.thinks:
            return False
        self.right[skill] += _SMOOTHING * (right - self.right[skill])
        if self.right[skill] <= self.plan.target or level + 1 == len(self.plan.lengths):
            return False
        self.history.append({"skill": skill, "length": self.plan.lengths[level], "solved_at_step": self.step})
        self.level[skill] += 1
        self.right[skill] = 0.0
        return True

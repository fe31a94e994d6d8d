"""What the probe is trained on, step by step: first to copy, then to retrieve, then over longer contexts.

Without the copy task first and alone the model stays at chance: attention that finds what came behind this
token before is the circuit that retrieval is built from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from probe_training.training_data import TrainingSequence, chat_sequence, copy_sequence

_SMOOTHING = 0.1
"""Weight of one step in the running accuracy."""


@dataclass(frozen=True)
class Stage:
    """Training at one context length (tokens), until the accuracy of its main task passes `target`."""

    context: int
    copy_share: float
    symbols: int = 0
    """Size of the copy task's alphabet; 0 for the whole vocabulary."""
    target: float = 0.95

    @property
    def main_task(self) -> str:
        return "copy" if self.copy_share == 1.0 else "chat"


@dataclass(frozen=True)
class Plan:
    """The stages, then `polish_steps` over all their contexts mixed while the learning rate falls."""

    stages: Sequence[Stage]
    polish_steps: int
    tokens_per_step: int = 4096
    learning_rate: float = 1e-3
    warm_up_steps: int = 100


def full_plan(longest: int = 4096, polish_steps: int = 1200) -> Plan:
    """The plan of the committed checkpoint."""
    contexts = [64 << doubling for doubling in range(1, (longest // 64).bit_length())]
    return Plan(
        stages=(
            Stage(64, copy_share=1.0, symbols=64),
            Stage(64, copy_share=1.0),
            Stage(64, copy_share=0.5),
            *(Stage(context, copy_share=0.125) for context in contexts),
        ),
        polish_steps=polish_steps,
    )


def smoke_plan() -> Plan:
    """Every kind of stage in seconds; the model that comes out has learnt nothing."""
    return Plan(
        stages=(Stage(64, 1.0, 64, target=-1.0), Stage(64, 0.5, target=-1.0)),
        polish_steps=2,
        tokens_per_step=256,
    )


@dataclass
class Curriculum:
    """Where a run stands in its plan. Its state is plain data, saved with the weights."""

    plan: Plan
    seed: int
    step: int = 0
    stage_index: int = 0
    polished: int = 0
    accuracy: dict[str, float] = field(default_factory=dict)
    """Running accuracy by task, since the stage began."""
    history: list[dict[str, float]] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "plan"}

    def restore(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    @property
    def polishing(self) -> bool:
        return self.stage_index == len(self.plan.stages)

    @property
    def finished(self) -> bool:
        return self.polishing and self.polished >= self.plan.polish_steps

    @property
    def progress(self) -> float:
        """Share of the plan that is done; its stages and its polish count one half each."""
        stages = self.stage_index / len(self.plan.stages)
        polish = self.polished / self.plan.polish_steps
        return (stages + polish) / 2

    @property
    def context(self) -> int:
        return self._stage.context

    @property
    def _stage(self) -> Stage:
        return self.plan.stages[min(self.stage_index, len(self.plan.stages) - 1)]

    def learning_rate(self) -> float:
        """Warm-up, then constant, halved past context 512; falls as a half cosine to 2 % while polishing."""
        rate = self.plan.learning_rate * min(1.0, (self.step + 1) / self.plan.warm_up_steps)
        if self.context > 512:
            rate /= 2
        if self.polishing:
            done = self.polished / self.plan.polish_steps
            rate *= 0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2
        return rate

    def batch(self) -> tuple[str, list[TrainingSequence]]:
        """The name of the task of this step, and its sequences. Depends on seed, step and stage alone."""
        rng = Random(f"{self.seed}/{self.step}")
        stage = self._stage
        context = self._draw_context(stage, rng)
        count = max(1, self.plan.tokens_per_step // context)
        if rng.random() < stage.copy_share:
            return "copy", [copy_sequence(context, stage.symbols, rng) for _ in range(count)]
        stretch = context >= 256
        return "chat", [chat_sequence(context, rng, stretch and rng.random() < 0.5) for _ in range(count)]

    def _draw_context(self, stage: Stage, rng: Random) -> int:
        """The stage's context mostly, and half the time while polishing; else one of all up to it."""
        if stage.context == 64 or rng.random() < (0.5 if self.polishing else 0.75):
            return stage.context
        return 64 << rng.randrange((stage.context // 64).bit_length())

    def advance(self, task: str, accuracy: float) -> bool:
        """Counts the step that `batch` described; True when it ended a stage."""
        before = self.accuracy.get(task, 0.0)
        self.accuracy[task] = before + _SMOOTHING * (accuracy - before)
        self.step += 1
        if self.polishing:
            self.polished += 1
            return self.finished
        stage = self.plan.stages[self.stage_index]
        if self.accuracy.get(stage.main_task, 0.0) <= stage.target:
            return False
        self.stage_index += 1
        self.history.append(
            {"context": stage.context, "copy_share": stage.copy_share, "solved_at_step": self.step}
        )
        self.accuracy = {}
        return True

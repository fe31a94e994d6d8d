"""Answers that are written while rules let go of KV: thoughts, and normal decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmark.eviction.decoder import Reaction, decode, load_model
from benchmark.eviction.retention import note_step
from sgl_importance.embedded_model import checkpoint_path
from sgl_importance_lab.probe.tokenizer import encode_text
from sgl_importance_lab.reasoner import reasoner_path
from sgl_importance_lab.reasoner.tasks import ReasoningTask, make_task
from sgl_importance_lab.reasoner.tokenizer import reasoner_tokenizer, render
from sgl_importance_lab.study.thinking.wants import Wants
from sgl_importance_lab.workload.kinds import Shape, generation

THOUGHT, DECODE = "thought", "decode"
DECODE_TOKENS = 192


@dataclass(frozen=True)
class Asked:
    """One request, and what is right.

    Attributes:
        rid: "kind/...".
        prompt: token ids.
        right: the right output ids.
        task: of a thought; None in normal decode.
    """

    rid: str
    prompt: Sequence[int]
    right: Sequence[int]
    task: ReasoningTask | None = None

    def right_before(self, written: Sequence[int]) -> float:
        """Share of the answer before its first wrong token; 1 for one that is right to the end."""
        pairs = zip(written, self.right, strict=False)
        same = next((at for at, (one, other) in enumerate(pairs) if one != other), len(written))
        return same / len(self.right)


class Kind:
    """Requests of one kind with the model that answers them."""

    def __init__(self, name: str) -> None:
        assert name in (THOUGHT, DECODE)
        self.name = name
        self.model: Any = load_model(reasoner_path() if name == THOUGHT else checkpoint_path())

    @property
    def heads(self) -> int:
        config = self.model.config
        return int(config.num_hidden_layers * config.num_key_value_heads)

    def asked(self, length: int, seeds: Sequence[int]) -> list[Asked]:
        """Requests with contexts of about ``length`` tokens; thoughts of two tasks in turn."""
        if self.name == THOUGHT:
            return [_thought(("search", "state")[seed % 2], length, seed // 2) for seed in seeds]
        return [_continued(length, seed) for seed in seeds]

    def answers(
        self,
        asked: Sequence[Asked],
        reactions: Sequence[Reaction | None],
        advance: Callable[[], None] = lambda: None,
    ) -> list[list[int]]:
        prompts, rights = [each.prompt for each in asked], [each.right for each in asked]
        return decode(self.model, prompts, rights, reactions, advance=advance)


def _thought(name: str, length: int, seed: int) -> Asked:
    task = make_task(name, length, seed)
    tokenizer = reasoner_tokenizer()
    right = tokenizer.encode(task.reply)
    prompt = tokenizer.encode(render(task.messages))
    return Asked(f"{THOUGHT}/{name}-{length}-{seed}", prompt, right, task)


def _continued(length: int, seed: int) -> Asked:
    asked = next(generation(Shape(document_tokens=length, answer_tokens=DECODE_TOKENS), 0, seed))
    assert asked.answer is not None
    right = encode_text(asked.answer)
    right = right[: DECODE_TOKENS - 1]  # the space behind the last word
    return Asked(f"{DECODE}/{length}-{seed}", encode_text(asked.prompt), right)


@dataclass
class Watching:
    """Lets go of nothing; writes down what was wanted."""

    live: Wants

    def __call__(self, step: int, row: Any) -> None:
        note_step(self.live, step, row.mass)

    def wants(self, steps: int) -> Wants:
        """Of an answer with so many tokens."""
        return self.live.steps(np.arange(min(steps, self.live.num_steps)))

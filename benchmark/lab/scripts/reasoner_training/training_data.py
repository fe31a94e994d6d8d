"""Seeded training sequences of the reasoner: a prompt, the right thought about it and the answer.

Sequence k of a run depends on the seed and k alone, so a resumed run sees what an uninterrupted one would.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from sgl_importance_lab.probe.word_tokenizer import END
from sgl_importance_lab.reasoner.tasks import ReasoningTask
from sgl_importance_lab.reasoner.tokenizer import THINK, reasoner_tokenizer, render

_MOST_GAPS = 3
_LARGEST_STRETCH = 4096


@dataclass(frozen=True)
class ReasoningSequence:
    """Token ids and their positions; the model must predict every token from index `reply_start` on."""

    ids: list[int]
    positions: list[int]
    reply_start: int


def reasoning_sequence(
    task: ReasoningTask, thinks: bool, stretch_rng: Random | None = None
) -> ReasoningSequence:
    """The chat with its right reply: with the thought, or with nothing but the answer.

    `stretch_rng` opens gaps between the positions of steps, so that distances beyond the length are seen.
    """
    tokenizer = reasoner_tokenizer()
    prompt = tokenizer.encode(render(task.messages))
    reply = task.reply if thinks else f"{task.answer} "
    ids = [*prompt, *tokenizer.encode(reply), tokenizer.ids[END]]
    positions = list(range(len(ids)))
    if stretch_rng is not None:
        starts = [len(prompt), len(prompt) + 1]
        if thinks:
            assert reply.startswith(THINK)
            starts += [len(prompt) + 1 + start for start in task.solution.thought.step_starts]
        _open_gaps(positions, starts, stretch_rng)
    return ReasoningSequence(ids, positions, len(prompt))


def _open_gaps(positions: list[int], starts: list[int], rng: Random) -> None:
    spare = rng.randint(0, _LARGEST_STRETCH)
    for _ in range(_MOST_GAPS):
        gap = rng.randint(0, spare)
        spare -= gap
        for index in range(rng.choice(starts), len(positions)):
            positions[index] += gap

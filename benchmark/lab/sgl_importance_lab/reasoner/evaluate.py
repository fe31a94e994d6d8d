"""Grades an OpenAI-compatible server on the reasoning tasks: right answers, and right steps of thoughts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sgl_importance_lab.probe.chat_client import ChatClient, task_group
from sgl_importance_lab.reasoner.tasks import ReasoningTask, make_task
from sgl_importance_lab.reasoner.tokenizer import END_OF_THOUGHT, THINK
from sgl_importance_lab.reasoner.verify import verify

_SPARE_TOKENS = 64
"""For the marks, the answer, and a thought that takes a little more than the right one."""


@dataclass(frozen=True)
class ReasoningRow:
    """Over `n` instances of one task at one length of the right thought, in tokens."""

    task: str
    length: int
    n: int
    exact_match: float
    """Share of right final answers."""
    steps_right: float
    """Mean share of the steps of a thought before its first wrong one."""
    first_wrong: dict[str, int]
    """How many thoughts went wrong first at a step of each kind."""


@dataclass(frozen=True)
class ReasoningPlan:
    """The instances to ask. Instance k of a cell has seed `seed + k`: the same plan, the same prompts."""

    tasks: Sequence[str]
    lengths: Sequence[int]
    n: int
    seed: int = 0

    @property
    def instances(self) -> int:
        return len(self.tasks) * len(self.lengths) * self.n

    def cells(self) -> Iterator[tuple[str, int]]:
        """Task and length, in the order of the rows."""
        for task in self.tasks:
            for length in self.lengths:
                yield task, length

    def cell_tasks(self, cell: tuple[str, int]) -> list[ReasoningTask]:
        return [make_task(*cell, self.seed + number) for number in range(self.n)]


@dataclass(frozen=True)
class Grade:
    """Of one reply."""

    right: bool
    steps_right: float
    wrong_kind: str | None


def grade(task: ReasoningTask, message: Mapping[str, str | None]) -> Grade:
    """Grades the message of a reply, with its thought in `content` or, parsed by the server, beside it."""
    content = message.get("content") or ""
    thought = message.get("reasoning_content")
    if thought is None:
        thought, answer = split_reply(content)
    else:
        answer = content.strip()
    verdict = verify(task.prompt, thought)
    wrong = verdict.first_wrong
    return Grade(answer == task.answer, verdict.share_right, None if wrong is None else wrong.kind)


def split_reply(reply: str) -> tuple[str, str]:
    """The thought of a reply, without marks, and what follows it; an empty thought where there is none.

    A thought that does not end has no answer behind it.
    """
    _, begin, rest = reply.partition(THINK)
    if not begin:
        return "", reply.strip()
    thought, _, answer = rest.partition(END_OF_THOUGHT)
    return thought.strip(), answer.strip()


def summarize(cell: tuple[str, int], grades: Sequence[Grade]) -> ReasoningRow:
    """The row of one cell."""
    kinds = [each.wrong_kind for each in grades if each.wrong_kind is not None]
    return ReasoningRow(
        *cell,
        n=len(grades),
        exact_match=sum(each.right for each in grades) / len(grades),
        steps_right=sum(each.steps_right for each in grades) / len(grades),
        first_wrong={kind: kinds.count(kind) for kind in sorted(set(kinds))},
    )


async def evaluate(
    client: ChatClient,
    plan: ReasoningPlan,
    concurrency: int,
    on_answer: Callable[[], None] = lambda: None,
) -> list[ReasoningRow]:
    """Asks every instance of `plan`, at most `concurrency` at a time; rows come in the order of its cells.

    Calls `on_answer` after each answer. Raises ServerError at the first request that fails, and asks no more.
    """
    model = await client.model()
    free = asyncio.Semaphore(concurrency)

    async def ask(task: ReasoningTask) -> Grade:
        # A path is part of a thought, so no answer is longer than its thought.
        longest = 2 * len(task.solution.thought.pieces) + _SPARE_TOKENS
        async with free:
            message = await client.message(model, task.messages, longest)
        on_answer()
        return grade(task, message)

    rows = []
    for cell in plan.cells():
        async with task_group() as group:
            asked = [group.create_task(ask(task)) for task in plan.cell_tasks(cell)]
        rows.append(summarize(cell, [each.result() for each in asked]))
    return rows

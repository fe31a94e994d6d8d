"""Grades an OpenAI-compatible server on the retrieval tasks: greedy answers, exact match."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sgl_importance_lab.probe.chat_client import ChatClient, task_group
from sgl_importance_lab.probe.tasks import ProbeTask, make_task

_ANSWER_TOKENS = 8


@dataclass(frozen=True)
class EvalRow:
    """Share of exact answers over `n` prompts of one task at one length (tokens of the probe's tokenizer)."""

    task: str
    length: int
    unseen_names: bool
    n: int
    exact_match: float


@dataclass(frozen=True)
class EvalPlan:
    """The prompts to ask. Prompt k of a cell has seed `seed + k`: the same plan, the same prompts."""

    tasks: Sequence[str]
    lengths: Sequence[int]
    n: int
    seed: int = 0

    @property
    def prompts(self) -> int:
        return len(self.tasks) * len(self.lengths) * 2 * self.n

    def cells(self) -> Iterator[tuple[str, int, bool]]:
        """Task, length, and whether the asked names are unseen ones, in the order of the rows."""
        for task in self.tasks:
            for length in self.lengths:
                for unseen_names in (False, True):
                    yield task, length, unseen_names

    def cell_tasks(self, cell: tuple[str, int, bool]) -> list[ProbeTask]:
        task, length, unseen_names = cell
        return [make_task(task, length, self.seed + index, unseen_names) for index in range(self.n)]


async def evaluate(
    client: ChatClient, plan: EvalPlan, concurrency: int, on_answer: Callable[[], None] = lambda: None
) -> list[EvalRow]:
    """Asks every prompt of `plan`, at most `concurrency` at a time; the rows come in the order of its cells.

    Calls `on_answer` after each answer. Raises ServerError at the first request that fails, and asks no more.
    """
    model = await client.model()
    free = asyncio.Semaphore(concurrency)

    async def grade(task: ProbeTask) -> bool:
        async with free:
            message = await client.message(model, task.messages, _ANSWER_TOKENS)
        on_answer()
        return (message.get("content") or "").strip() == task.answer

    rows = []
    for cell in plan.cells():
        async with task_group() as group:
            grades = [group.create_task(grade(task)) for task in plan.cell_tasks(cell)]
        task, length, unseen_names = cell
        exact_match = sum(grade.result() for grade in grades) / plan.n
        rows.append(EvalRow(task, length, unseen_names, plan.n, exact_match))
    return rows

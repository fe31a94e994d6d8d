"""Tasks that are right only after a long thought: `program`, `search` and `state`.

`program` asks for a variable of a program, `search` for the path that a depth-first search finds, from its
goal back to its start, `state` for the node from which such a search entered another. Every task has one
right thought, so the first wrong step of any other is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from random import Random

from sgl_importance_lab.probe.tasks import Message
from sgl_importance_lab.reasoner import program, search
from sgl_importance_lab.reasoner.program import Program, draw_program
from sgl_importance_lab.reasoner.search import Search, draw_search
from sgl_importance_lab.reasoner.thought import BadPrompt, Solution
from sgl_importance_lab.reasoner.tokenizer import END_OF_THOUGHT, THINK

_DRAWS: Mapping[str, Callable[[int, Random], Program | Search]] = {
    "program": draw_program,
    "search": lambda tokens, rng: draw_search(tokens, rng, asks_state=False),
    "state": lambda tokens, rng: draw_search(tokens, rng, asks_state=True),
}
TASKS = tuple(_DRAWS)
FEWEST_TOKENS = max(program.FEWEST_TOKENS, search.FEWEST_TOKENS)
MOST_TOKENS = {
    "program": program.MOST_TOKENS,
    "search": search.MOST_TOKENS,
    "state": search.MOST_TOKENS,
}
"""Of the longest thought of each task: there are no more names."""


@dataclass(frozen=True)
class ReasoningTask:
    """One prompt with its only right thought and answer."""

    task: str
    problem: Program | Search

    @property
    def prompt(self) -> str:
        """The text of the user's message."""
        return " ".join(self.problem.words)

    @property
    def messages(self) -> list[Message]:
        return [{"role": "user", "content": self.prompt}]

    @cached_property
    def solution(self) -> Solution:
        return self.problem.solve()

    @property
    def answer(self) -> str:
        return self.solution.answer

    @property
    def thought(self) -> str:
        """The right thought, without the marks around it."""
        return self.solution.thought.text

    @property
    def reply(self) -> str:
        """The whole right reply of a model that thinks."""
        return f"{THINK}{self.thought}{END_OF_THOUGHT}{self.answer} "


def draw_task(task: str, tokens: int, rng: Random) -> ReasoningTask:
    """A task whose thought has at most `tokens` tokens, and at least 85 % of them or no more than 7 fewer.

    Raises ValueError for an unknown task or a length that it cannot have.
    """
    if task not in _DRAWS:
        raise ValueError(f"unknown task {task!r}: choose from {', '.join(TASKS)}")
    if not FEWEST_TOKENS <= tokens <= MOST_TOKENS[task]:
        allowed = f"{FEWEST_TOKENS} to {MOST_TOKENS[task]}"
        raise ValueError(f"a thought about a {task} has {allowed} tokens, not {tokens}")
    return ReasoningTask(task, _DRAWS[task](tokens, rng))


def make_task(task: str, length: int, seed: int) -> ReasoningTask:
    """The task's instance number `seed`. Training draws its own from other seeds."""
    return draw_task(task, length, Random(f"evaluation/{task}/{length}/{seed}"))


def read_prompt(text: str) -> Program | Search:
    """The problem that a prompt states; BadPrompt for a text that is none."""
    words = text.split()
    match words[:1]:
        case ["Program"]:
            return Program.from_words(words)
        case ["Graph"]:
            return Search.from_words(words)
    raise BadPrompt("a prompt begins with 'Program :' or 'Graph :'")

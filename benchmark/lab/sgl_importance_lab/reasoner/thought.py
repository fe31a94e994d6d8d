"""A thought as a list of steps, and from which of its own earlier tokens each token was read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sgl_importance.errors import ImportanceError


@dataclass(frozen=True)
class Step:
    """One verifiable unit of a thought."""

    kind: str
    pieces: tuple[str, ...]


@dataclass(frozen=True)
class LookBack:
    """Token `token` of the thought can only be known from its token `source`, or from an older equal one."""

    token: int
    source: int
    kind: str

    @property
    def distance(self) -> int:
        """Tokens from the one whose query writes `token` back to `source`."""
        return self.token - 1 - self.source


@dataclass
class Thought:
    """Written token by token, as text pieces of one token each; indices count from the first piece."""

    pieces: list[str] = field(default_factory=list)
    look_backs: list[LookBack] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)
    _kinds: list[str] = field(default_factory=list)

    def begin(self, kind: str) -> None:
        """What is written from here on belongs to a new step."""
        self._starts.append(len(self.pieces))
        self._kinds.append(kind)

    def write(self, *words: str) -> int:
        """Appends words; the index of the last one."""
        assert self._starts, "a word before the first step"
        self.pieces += [word + " " for word in words]
        return len(self.pieces) - 1

    def read(self, word: str, source: int | None, kind: str) -> int:
        """As `write`, of a word known from token `source`; None where the prompt says it."""
        index = self.write(word)
        if source is not None:
            assert source < index
            self.look_backs.append(LookBack(index, source, kind))
        return index

    @property
    def step_starts(self) -> Sequence[int]:
        """Index of the first token of each step."""
        return self._starts

    @property
    def steps(self) -> list[Step]:
        ends = [*self._starts[1:], len(self.pieces)]
        return [
            Step(kind, tuple(self.pieces[start:end]))
            for kind, start, end in zip(self._kinds, self._starts, ends, strict=True)
        ]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True)
class Solution:
    """The one right thought about a prompt, and the answer that follows from it."""

    thought: Thought
    answer: str


class BadPrompt(ImportanceError, ValueError):
    """A text that is no prompt of the task; the message says what is wrong with it."""


def after(words: Sequence[str], keyword: str) -> Sequence[str]:
    """The words behind `keyword :`; BadPrompt where there is none."""
    for index in range(len(words) - 1):
        if words[index] == keyword and words[index + 1] == ":":
            return words[index + 2 :]
    raise BadPrompt(f"the prompt has no '{keyword} :'")

"""The interface of trace readers, and their report on records that they cannot use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sgl_importance.errors import ImportanceError
from sgl_importance_lab.replay.trace import Trace


class TraceError(ImportanceError, ValueError):
    """A trace cannot be read; the message is one line that says where, why, and what to do."""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be used; ``line`` counts from 1 (records, in a binary file)."""

    path: Path
    line: int
    cause: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.cause}"


OnBadRecord = Callable[[BadRecord], None]


def refuse_bad_record(record: BadRecord) -> None:
    """The default: the first bad record ends the reading.

    Raises:
        TraceError: always.
    """
    raise TraceError(str(record))


def _say_nothing(text: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of the command line about reading.

    Attributes:
        tokenizer: name or folder of a Hugging Face tokenizer for traces of text; None takes UTF-8 bytes.
        block_tokens: tokens of a block; None takes the format's own.
        object_level: blocks are independent, so that an id may follow any other.
        alive: sessions that are alive at a time, where a format leaves open when each began; None takes the
            reader's own.
        seed: of the order in which these sessions begin.
        remark: gets, once each, what the trace does not say and what was taken instead.
    """

    tokenizer: str | None = None
    block_tokens: int | None = None
    object_level: bool = False
    alive: int | None = None
    seed: int = 0
    remark: Callable[[str], None] = _say_nothing


class TraceReader(Protocol):
    """A module of this package that reads one format."""

    NAME: str
    """Name on the command line."""

    def matches(self, path: Path) -> bool:
        """Whether the content looks like this format; never raises for content that does not."""

    def read(self, path: Path, options: ReadOptions, on_bad_record: OnBadRecord) -> Trace:
        """Reads the whole trace; a bad record is handed on and, if that returns, skipped.

        Raises:
            TraceError: the trace cannot be read at all.
        """

"""How an answer ended, which says how soon its session comes back."""

from __future__ import annotations

from enum import IntEnum

MAX_AWAITED = 4096
"""Answers whose end may still be told. The HTTP process tells within milliseconds, or never."""


class AnswerEnd(IntEnum):
    """What the last token of an answer was, as the server that generated it sees it."""

    UNKNOWN = 0
    """Nobody said."""
    TOOL_CALL = 1
    """A call of a tool: a program answers, mostly within seconds."""
    END_OF_TURN = 2
    """The model was done: a person answers, or nobody."""
    LENGTH = 3
    """The limit on generated tokens."""
    ABORT = 4
    """The client went away, or the server gave the request up."""

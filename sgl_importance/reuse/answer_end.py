"""How an answer ended, which says how soon its session comes back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class AnswerMarkers:
    """Tokens of a model's vocabulary that occur in calls of tools and nowhere else.

    Attributes:
        tool_call_ids: ids of these tokens.
        mark_every_call: whether a call without one of them cannot be. Otherwise text without a marker may be
            a call all the same (JSON, Python), and only a parser of the text knows.
    """

    tool_call_ids: frozenset[int]
    mark_every_call: bool

    def end_of(self, finish_reason: str, output_ids: Iterable[int], *, is_json: bool) -> AnswerEnd:
        """How an answer ended.

        Args:
            finish_reason: "stop", "length" or "abort", as sglang names it.
            output_ids: the generated tokens.
            is_json: whether a schema constrained the answer to JSON. A call that the client requires comes in
                this form, without a marker.
        """
        if finish_reason == "length":
            return AnswerEnd.LENGTH
        if finish_reason == "abort":
            return AnswerEnd.ABORT
        if finish_reason != "stop":
            return AnswerEnd.UNKNOWN
        if not self.tool_call_ids.isdisjoint(output_ids):
            return AnswerEnd.TOOL_CALL
        return AnswerEnd.END_OF_TURN if self.mark_every_call and not is_json else AnswerEnd.UNKNOWN

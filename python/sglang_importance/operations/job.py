"""Operations: functions that answer arguments with a document, at once or slice by slice."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any

from sgl_importance.errors import ImportanceError
from sglang_importance.cache.importance_cache import ImportanceRadixCache

Document = dict[str, Any]
Job = Generator[None, None, Document]
Operation = Callable[[ImportanceRadixCache, Document], Document | Job]
"""Answers arguments with a document at once, or with a generator that yields after each of its slices.

Arguments come from our own routes, which have validated them.
"""

# The longest that a slice holds the scheduler: a small part of any decode step.
SLICE_SECONDS = 0.002
CALLS_PER_LOOK = 16


class RequestError(ImportanceError):
    """The caller asked for something that cannot be answered; the message is for the caller."""

    status = 400


class NotFound(RequestError):
    """The caller named something that does not exist, or does not any more."""

    status = 404


class NoLongerKnown(RequestError):
    """A fault has ended learning: nothing is known of nodes any more."""

    status = 503


class Slices:
    """Says when a slice is over; looks at the clock only now and then.

    Args:
        calls_per_look: calls of ``is_due`` from one look at the clock to the next; CALLS_PER_LOOK where None.
    """

    def __init__(self, calls_per_look: int | None = None) -> None:
        self._calls_per_look = calls_per_look or CALLS_PER_LOOK
        self._calls = 0
        self._end = time.perf_counter() + SLICE_SECONDS

    def is_due(self) -> bool:
        self._calls += 1
        if self._calls % self._calls_per_look or time.perf_counter() < self._end:
            return False
        # The next slice begins when the caller comes back: a little early is no harm.
        self._end = time.perf_counter() + SLICE_SECONDS
        return True


def run_slice(job: Job) -> Document | None:
    """Runs a job for one slice; its document once it is finished, else None."""
    try:
        next(job)
    except StopIteration as finished:
        document: Document = finished.value
        return document
    return None

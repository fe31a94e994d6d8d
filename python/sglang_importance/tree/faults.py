"""Exceptions of ours in a scheduler: counted, logged once, and never the end of serving.

A fault in learning or ranking ends both for good: from then on the server evicts by LRU, over upstream's
own sets, which stay complete at every moment. A fault beside them (in an answer to the HTTP process, a
metric, a recording) costs only that result. Errors of sglang itself stay fatal: ``upstream`` marks our calls
of it.

With several tensor-parallel ranks all must evict alike. Learning and ranking are functions of what all ranks
see alike, so they fail on all at the same call; page scores are each rank's own, and their failure is agreed
on where they are reduced (``attention/rank_sums.py``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from sgl_importance.errors import ImportanceError
from sgl_importance.metrics_table import FaultPlace

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class UpstreamError(ImportanceError):
    """sglang failed in a call of ours: KV, slots or pages may be wrong, so the scheduler has to end."""


@contextmanager
def upstream() -> Iterator[None]:
    """Around calls of ours that change upstream's tree or pools: their exceptions are no faults of ours.

    Raises:
        UpstreamError: from the error.
    """
    try:
        yield
    except Exception as error:
        raise UpstreamError(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Fallback:
    """The change of a server over to LRU: its cause and time.

    Attributes:
        place: of the first fault of learning or ranking.
        error: its type and text.
        clock: in admitted requests.
        time: Unix time in seconds.
    """

    place: FaultPlace
    error: str
    clock: int
    time: float


class Faults:
    """Runs code that may fail, and counts and logs its faults.

    Args:
        counts: faults so far by place; counted on here.
        clock: admitted requests so far.
    """

    def __init__(self, counts: dict[FaultPlace, int], clock: Callable[[], int]) -> None:
        self.counts = counts
        self.fallback: Fallback | None = None
        self.on_fallback: list[Callable[[], None]] = []
        """Called once, when learning ends, to release resources."""
        self._clock = clock

    @property
    def is_learning(self) -> bool:
        """Whether this server still learns and ranks."""
        return self.fallback is None

    def learn(self, place: FaultPlace, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Does the work while the server learns; None where it does not any more, or has just failed.

        Raises:
            UpstreamError: sglang failed within the work.
        """
        if self.fallback is not None:
            return None
        try:
            return work(*args, **kwargs)
        except UpstreamError:
            raise
        except Exception as error:
            self._fall_back(place, error)
            return None

    def beside(self, place: FaultPlace, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Does work that learning and ranking do not depend on; None where it failed."""
        try:
            return work(*args, **kwargs)
        except Exception as error:
            self.note(place, error)
            return None

    def note(self, place: FaultPlace, error: Exception) -> None:
        """Counts a fault; the first one of a place is logged with its traceback."""
        self.counts[place] += 1
        if self.counts[place] == 1:
            logger.error("KV importance: fault in %s; later ones are only counted", place, exc_info=error)

    def _fall_back(self, place: FaultPlace, error: Exception) -> None:
        self.note(place, error)
        self.fallback = Fallback(place, _one_line(error), self._clock(), time.time())
        logger.error("KV importance: from here on this server evicts by LRU, until it is restarted")
        for let_go in self.on_fallback:
            self.beside(place, let_go)

    def describe(self) -> dict[str, Any]:
        """As JSON: counts by place, and the fallback or null."""
        fallback = self.fallback
        return {
            "counts": {place.value: count for place, count in self.counts.items() if count},
            "fallback": None
            if fallback is None
            else {
                "evicts_by": "lru",
                "place": fallback.place.value,
                "error": fallback.error,
                "clock": fallback.clock,
                "time": fallback.time,
            },
        }


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())

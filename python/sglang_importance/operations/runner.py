"""Runs the operations that the HTTP process asks for, a slice at a time, between the scheduler's steps."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sgl_importance.metrics_table import FaultPlace
from sglang_importance.cache.importance_cache import ImportanceRadixCache
from sglang_importance.operations.job import Document, Job, NoLongerKnown, Operation, RequestError, run_slice
from sglang_importance.tree.faults import UpstreamError

MAX_JOBS = 8
"""Answers under way at once, of a process that answers HTTP. Callers wait for a place there
(``scheduler_client``), so that none loses its job."""
INTERNAL_ERROR = 500


class TooManyJobs(RequestError):
    """Other callers have taken the place of this one's job."""

    status = 503


class Reply(NamedTuple):
    """A JSON document, an error with its HTTP status, or a job to be continued."""

    document: str = ""
    error: str | None = None
    status: int = 200
    job: int | None = None


@dataclass
class Desk:
    """Answers the operations of one scheduler. An exception of an operation becomes its caller's answer.

    The caller drives its job by asking again, so the scheduler steps between the slices, and a caller that
    goes away leaves nothing running.

    Args:
        cache: that operations act on.
        operations: by name.
        without_learning: those that still have an answer once a fault has ended learning.
        on_slice: called with the operation, the seconds that the scheduler was held, and whether it is over.
        follows: whether nobody reads the answers: an operation that is not named is left out.
        max_jobs: answers under way at once.
    """

    cache: ImportanceRadixCache
    operations: Mapping[str, Operation]
    without_learning: frozenset[str] = frozenset()
    on_slice: Callable[[str, float, bool], None] | None = None
    follows: bool = False
    max_jobs: int = MAX_JOBS

    def __post_init__(self) -> None:
        self._jobs: OrderedDict[int, tuple[str, Job]] = OrderedDict()
        self._serial = 0

    def begin(self, operation: str, arguments: Document) -> Reply:
        """Runs an operation, or its first slice."""
        self._serial += 1  # also of what is left out: ranks number their jobs alike
        if self.follows and operation not in self.operations:
            return Reply()
        start = time.perf_counter()
        try:
            self._refuse_without_learning(operation)
            answer = self.operations[operation](self.cache, arguments)
            if not isinstance(answer, dict):
                return self._run_slice(self._serial, operation, answer)
            reply = Reply(document=json.dumps(answer))
        except Exception as error:
            reply = self._failed(error)
        self._account(operation, start, is_over=True)
        return reply

    def resume(self, job: int) -> Reply:
        """Runs the next slice of a job that a reply named."""
        running = self._jobs.pop(job, None)
        if running is None:
            problem = (
                f"more than {self.max_jobs} answers were under way at once, of which this was the oldest"
            )
            return _refused(TooManyJobs(f"{problem}: ask again"))
        return self._run_slice(job, *running)

    def _run_slice(self, serial: int, operation: str, job: Job) -> Reply:
        start = time.perf_counter()
        reply = None
        try:
            self._refuse_without_learning(operation)
            document = run_slice(job)
            if document is not None:
                reply = Reply(document=json.dumps(document))
        except Exception as error:
            reply = self._failed(error)
        self._account(operation, start, is_over=reply is not None)
        if reply is not None:
            return reply
        self._jobs[serial] = operation, job
        while len(self._jobs) > self.max_jobs:
            self._jobs.popitem(last=False)
        return Reply(job=serial)

    def _refuse_without_learning(self, operation: str) -> None:
        fallback = self.cache.importance.state.faults.fallback
        if fallback is not None and operation not in self.without_learning:
            raise NoLongerKnown(
                f"a fault in {fallback.place} has ended learning ({fallback.error}): this server evicts by "
                "LRU until it is restarted"
            )

    def _failed(self, error: Exception) -> Reply:
        if isinstance(error, RequestError):
            return _refused(error)
        if isinstance(error, UpstreamError):
            raise error
        self.cache.importance.state.faults.note(FaultPlace.OPERATION, error)
        return Reply(error=f"{type(error).__name__}: {error}; see the server's log", status=INTERNAL_ERROR)

    def _account(self, operation: str, start: float, *, is_over: bool) -> None:
        if self.on_slice is not None:
            faults, seconds = self.cache.importance.state.faults, time.perf_counter() - start
            faults.beside(FaultPlace.METRICS, self.on_slice, operation, seconds, is_over)


def _refused(error: RequestError) -> Reply:
    return Reply(error=str(error), status=error.status)

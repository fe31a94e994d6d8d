"""Runs what the HTTP process asks of a scheduler, a slice at a time, between the scheduler's steps."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

MAX_JOBS = 8
"""Answers under way at once. Callers wait for a place (``scheduler_client``), so that none loses its job."""

Document = dict[str, Any]
Job = Generator[None, None, Document]
Operation = Callable[["Scheduler", Document], Document | Job]
"""Answers arguments with a document at once, or with a generator that yields after each of its slices.

Arguments come from our own routes, which have validated them.
"""


class RequestError(Exception):
    """The caller asked for something that cannot be answered; the message is for him."""

    status = 400


class NotFound(RequestError):
    """What the caller named does not exist, or does not any more."""

    status = 404


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
    """Answers the operations of one scheduler.

    The caller drives its job by asking again, so the scheduler steps between the slices, and a caller that
    goes away leaves nothing running.

    Args:
        scheduler: what operations act on.
        operations: what can be asked for, by name.
        on_slice: told of the operation, the seconds that the scheduler was held, and whether it is over.
    """

    scheduler: Scheduler
    operations: Mapping[str, Operation]
    on_slice: Callable[[str, float, bool], None] | None = None

    def __post_init__(self) -> None:
        self._jobs: OrderedDict[int, tuple[str, Job]] = OrderedDict()
        self._serial = 0

    def begin(self, operation: str, arguments: Document) -> Reply:
        """Runs an operation, or its first slice."""
        start = time.perf_counter()
        try:
            answer = self.operations[operation](self.scheduler, arguments)
        except RequestError as error:
            self._account(operation, start, is_over=True)
            return _refused(error)
        if isinstance(answer, dict):
            reply = Reply(document=json.dumps(answer))
            self._account(operation, start, is_over=True)
            return reply
        self._serial += 1
        return self._run_slice(self._serial, operation, answer)

    def resume(self, job: int) -> Reply:
        """Runs the next slice of a job that a reply named."""
        running = self._jobs.pop(job, None)
        if running is None:
            problem = f"more than {MAX_JOBS} answers were under way at once, of which this was the oldest"
            return _refused(TooManyJobs(f"{problem}: ask again"))
        return self._run_slice(job, *running)

    def _run_slice(self, serial: int, operation: str, job: Job) -> Reply:
        start = time.perf_counter()
        try:
            document = run_slice(job)
        except RequestError as error:
            self._account(operation, start, is_over=True)
            return _refused(error)
        if document is not None:
            reply = Reply(document=json.dumps(document))
            self._account(operation, start, is_over=True)
            return reply
        self._account(operation, start, is_over=False)
        self._jobs[serial] = operation, job
        while len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)
        return Reply(job=serial)

    def _account(self, operation: str, start: float, *, is_over: bool) -> None:
        if self.on_slice is not None:
            self.on_slice(operation, time.perf_counter() - start, is_over)


def run_slice(job: Job) -> Document | None:
    """Runs a job for one slice; its document once it is finished, else None."""
    try:
        next(job)
    except StopIteration as finished:
        document: Document = finished.value
        return document
    return None


def _refused(error: RequestError) -> Reply:
    return Reply(error=str(error), status=error.status)

"""Recordings of several servers as one: what a single cache in front of all of them would have been asked.

Requests come in order of time, by the clocks of the machines that recorded them. A page's digest stands for
its tokens and all before them, so pages with the same content are one page, whoever served them. Scores and
tree events are of each server's own tree: the merged recording has requests only.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge as merge_sorted
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from sgl_importance.observe.trace.reader import TraceError, TraceReader, open_trace
from sgl_importance.observe.trace.record_writer import RecordWriter
from sgl_importance.observe.trace.records import AnswerTold, Detail, RequestAdmitted, RequestFinished
from sgl_importance.observe.trace.writer import NO_PAGES

_NO_BUDGET = 1 << 60
_SAME = {
    "page_size": "--page-size",
    "digest": "one version of sgl-importance",
    "model": "one model, since caches of different models share nothing",
}
"""What must be the same in all recordings, and how it becomes so."""


@dataclass(frozen=True, slots=True)
class Merged:
    """What was written: requests, and pages by how many of the recordings have them."""

    requests: int
    pages: int
    shared_pages: int


@dataclass(frozen=True, slots=True)
class _Event:
    """A record of one run on the common clock."""

    microseconds: int
    run: int
    record: RequestAdmitted | RequestFinished | AnswerTold
    digests: Sequence[bytes] | None


def merge_recordings(directories: Sequence[Path], out: Path) -> Merged:
    """Writes one recording with the requests of several.

    Args:
        directories: of at least two recordings.
        out: directory of the new one, which must not hold a recording.

    Raises:
        TraceError: there is no recording, two are of different servers or the same, or ``out`` is there.
        OSError: the new one cannot be written. What was written of it is removed.
    """
    recordings = [open_trace(directory).by_run() for directory in directories]
    runs = [run for recording in recordings for run in recording]
    _check_runs(directories, recordings)
    headers = [run.header for run in runs]
    _check_same(runs)
    if not out.parent.is_dir():
        raise TraceError(f"no directory for {out}: create it first")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TraceError(f"{out} is there already: name a directory that is not")
    began = min(header.created for header in headers)  # a clock may have been put back between two runs
    capacity: Counter[str] = Counter()
    for recording in recordings:
        capacity.update(recording[0].header.capacity_tokens)
    header = msgspec.structs.replace(
        headers[0], run=uuid.uuid4().hex, created=began, capacity_tokens=dict(capacity), detail=Detail.FOLDS
    )
    with TemporaryDirectory(prefix=f"{out.name}-", dir=out.parent) as unfinished:
        merged = Path(unfinished) / "recording"
        writer = RecordWriter(merged, header, max_bytes=_NO_BUDGET)
        try:
            streams = [_events(run, number, began) for number, run in enumerate(runs)]
            requests = _write(writer, merge_sorted(*streams, key=lambda event: event.microseconds))
        finally:
            writer.close()
        merged.replace(out)
    seen = Counter(
        digest for recording in recordings for digest in {each for run in recording for each in run.digests}
    )
    return Merged(requests, len(seen), sum(count > 1 for count in seen.values()))


def _check_runs(directories: Sequence[Path], recordings: Sequence[Sequence[TraceReader]]) -> None:
    """A recording has a run for each start of a server."""
    known: set[str] = set()
    for directory, recording in zip(directories, recordings, strict=True):
        if not recording:
            raise TraceError(f"{directory} holds no whole record: record again")
        found = {run.header.run for run in recording}
        if known & found:
            raise TraceError(f"{directory} repeats a run of another: name each recording once")
        known |= found


def _check_same(runs: Sequence[TraceReader]) -> None:
    first = runs[0]
    for run in runs:
        for field, cure in _SAME.items():
            one, another = getattr(run.header, field), getattr(first.header, field)
            if one != another:
                raise TraceError(
                    f"{run.directory} and {first.directory} differ in {field.replace('_', ' ')}, "
                    f"{one} and {another}: merge recordings of {cure}"
                )


def _events(reader: TraceReader, run: int, began: float) -> Iterator[_Event]:
    """Requests of one run, in order of time but for what was handed over late."""
    start = round((reader.header.created - began) * 1e6)
    for record in reader:
        match record:
            case RequestAdmitted() | RequestFinished():
                digests = [reader.digest(page) for page in record.pages.tolist()]
                yield _Event(start + record.microseconds, run, record, digests)
            case AnswerTold():
                yield _Event(start + record.microseconds, run, record, None)


def _write(writer: RecordWriter, events: Iterator[_Event]) -> int:
    """Numbers requests and counts admissions anew; returns the number of requests."""
    numbers: dict[tuple[int, int], int] = {}
    admitted = 0
    for event in events:
        record = event.record
        number = numbers.setdefault((event.run, record.request), len(numbers))
        admitted += isinstance(record, RequestAdmitted)
        moved = msgspec.structs.replace(
            record, request=number, clock=admitted, microseconds=event.microseconds
        )
        if not isinstance(moved, AnswerTold):
            moved = msgspec.structs.replace(moved, pages=NO_PAGES)
        writer.write(moved, event.digests)
    return admitted

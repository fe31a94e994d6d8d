"""Reads a recording back, whole or cut short by a crash."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from sgl_importance.errors import ImportanceError
from sgl_importance.nodes.digests import DIGEST_BYTES
from sgl_importance.observe.trace.framing import FrameReader
from sgl_importance.observe.trace.records import (
    FORMAT_VERSION,
    Dropped,
    Header,
    Pages,
    Record,
    RequestAdmitted,
    RequestFinished,
    Vector,
    decode,
)
from sgl_importance.observe.trace.segments import segment_files


class TraceError(ImportanceError):
    """The directory holds no recording that can be read; the message says why and what to do."""


class TraceReader:
    """Records of a recording, in the order in which they were handed over. Can be iterated again.

    A run's header comes once; the pages of requests come as numbers that are dense within the directory.

    Args:
        directory: that a server wrote with ``--kv-importance-trace``.
        files: of its segments, for some of them only.

    Attributes:
        headers: of the runs seen so far, each the last one.
        run: index in ``headers`` of the run that the last record is of. Segments of runs alternate where two
            servers record in one directory at a time.
        digests: digest of each page number seen so far.
        torn_bytes: bytes of cut or damaged tails that were left out.
        dropped: records that the server could not write.

    Raises:
        TraceError: there is no recording; on iteration, a segment cannot be read, or is of a server with
            other pages than the ones before it.
    """

    def __init__(self, directory: Path | str, files: Sequence[Path] | None = None) -> None:
        self.directory = Path(directory)
        self._files = segment_files(self.directory) if files is None else files
        if not self._files:
            if replicas := [folder.name for folder in _recordings_of_replicas(self.directory)]:
                raise TraceError(
                    f"no recording in {self.directory} itself, but one of each replica in "
                    f"{', '.join(replicas)}: give one of these, or put them together with "
                    "`sgl-importance trace merge`"
                )
            raise TraceError(
                f"no recording in {self.directory}: give the directory that a server wrote with "
                "--kv-importance-trace"
            )
        self._reset()

    def _reset(self) -> None:
        self.headers: list[Header] = []
        self.run = -1
        self.digests: list[bytes] = []
        self._numbers: dict[bytes, int] = {}
        self.torn_bytes = 0
        self.dropped = 0

    @property
    def header(self) -> Header:
        """The first run's header, as it was at the first request.

        Raises:
            TraceError: the crash left not even that.
        """
        if not self.headers:
            next((record for record in self if isinstance(record, RequestAdmitted)), None)
        if not self.headers:
            raise TraceError(f"{self.directory} holds no whole record: record again")
        return self.headers[0]

    def digest(self, page: int) -> bytes:
        """The chained digest of a page number."""
        return self.digests[page]

    def by_run(self) -> list[TraceReader]:
        """A reader for each run, whose records are in order of time but for what was handed over late.

        Raises:
            TraceError: as on iteration.
        """
        files: dict[str, list[Path]] = {}
        for file in self._files:
            segment = TraceReader(self.directory, [file])
            next(iter(segment), None)
            if segment.headers:
                files.setdefault(segment.headers[0].run, []).append(file)
        return [TraceReader(self.directory, each) for each in files.values()]

    def __iter__(self) -> Iterator[Record]:
        self._reset()
        for file in self._files:
            try:
                stream = file.open("rb")
            except FileNotFoundError:
                continue  # a server that still records has deleted it meanwhile, to stay within its budget
            except OSError as error:
                raise TraceError(
                    f"{file} cannot be read ({error.strerror}): remove it, or change its permissions"
                ) from error
            with stream:
                yield from self._segment(file, stream)

    def _segment(self, file: Path, stream: BinaryIO) -> Iterator[Record]:
        local: list[int] = []
        frames = FrameReader(stream)
        for payload in frames:
            record = self._decode(payload, file)
            match record:
                case Header():
                    runs = [known.run for known in self.headers]
                    if record.run in runs:
                        self.run = runs.index(record.run)
                        self.headers[self.run] = record
                        continue
                    if self.headers and (difference := _difference(self.headers[0], record)):
                        raise TraceError(
                            f"{file} was recorded with {difference}: "
                            "move the segments of each server to a directory of their own"
                        )
                    self.run = len(runs)
                    self.headers.append(record)
                case Pages():
                    if record.first != len(local) or len(record.digests) % DIGEST_BYTES:
                        raise self._damaged(file)
                    local += self._number(record.digests)
                    continue
                case RequestAdmitted() | RequestFinished():
                    pages = _expand(record.pages, local)
                    if pages is None:
                        raise self._damaged(file)
                    record = msgspec.structs.replace(record, pages=pages)
                case Dropped():
                    self.dropped += record.records
            yield record
        self.torn_bytes += frames.torn_bytes

    def _decode(self, payload: bytes, file: Path) -> Record:
        try:
            record = decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            cause = " ".join(str(error).split())
            raise TraceError(
                f"{file} is of another version than {FORMAT_VERSION} ({cause}): read it with the version of "
                "sgl-importance that recorded it"
            ) from error
        if isinstance(record, Header) and record.version != FORMAT_VERSION:
            raise TraceError(
                f"{file} is of version {record.version}, not {FORMAT_VERSION}: read it with the version of "
                "sgl-importance that recorded it"
            )
        return record

    @staticmethod
    def _damaged(file: Path) -> TraceError:
        return TraceError(f"{file} names pages that it does not hold: remove it, or record again")

    def _number(self, digests: bytes) -> Iterator[int]:
        for start in range(0, len(digests), DIGEST_BYTES):
            digest = digests[start : start + DIGEST_BYTES]
            number = self._numbers.setdefault(digest, len(self._numbers))
            if number == len(self.digests):
                self.digests.append(digest)
            yield number


def _difference(known: Header, other: Header) -> str | None:
    """Why pages of two servers would be taken for each other's, or counted as of one size; None where not."""
    for field in ("page_size", "digest", "model"):
        one, another = getattr(known, field), getattr(other, field)
        if one != another:
            return f"another {field.replace('_', ' ')}, {one} and {another}"
    return None


def _expand(runs: Vector, local: list[int]) -> Vector | None:
    """Page numbers of runs (first page, number of pages); None where these are none of the segment's."""
    if not np.issubdtype(runs.dtype, np.integer) or len(runs) % 2:
        return None
    pages: list[int] = []
    for start, count in runs.reshape(-1, 2).tolist():
        if not 0 <= start <= start + count <= len(local):
            return None
        pages += local[start : start + count]
    return np.array(pages, dtype=np.int64)


def check_continues(directory: Path, header: Header) -> None:
    """Whether a reader takes a run with this header for one more of what the directory holds.

    Raises:
        TraceError: it would refuse the directory.
    """
    if not segment_files(directory):
        return
    reader = TraceReader(directory)
    next(iter(reader), None)
    if reader.headers and (difference := _difference(reader.headers[0], header)):
        raise TraceError(f"{directory} has a recording of {difference}: name a directory of its own")


def open_trace(directory: Path | str) -> TraceReader:
    """The recording in a directory; iterate over it for its records.

    Raises:
        TraceError: there is no recording.
    """
    return TraceReader(directory)


def _recordings_of_replicas(directory: Path) -> list[Path]:
    """Folders that data-parallel replicas recorded into."""
    found = [each for each in directory.glob("dp*") if each.name[2:].isdecimal() and segment_files(each)]
    return sorted(found, key=lambda folder: int(folder.name[2:]))

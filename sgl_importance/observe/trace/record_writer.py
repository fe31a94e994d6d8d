"""Writes records to the segment files of a recording; pages that records name become numbers on the way."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np

from sgl_importance.nodes.digests import DIGEST_BYTES
from sgl_importance.observe.trace.framing import frame
from sgl_importance.observe.trace.records import (
    Header,
    Pages,
    Record,
    RequestAdmitted,
    RequestFinished,
    Vector,
    encode,
)
from sgl_importance.observe.trace.segments import SegmentStore


class _PageNumbers:
    """Numbers of the pages that one segment has named."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def runs(self, digests: Iterable[bytes]) -> tuple[Vector, Pages | None]:
        """Runs of consecutive numbers, uint32 [2 * runs], and the record that names new pages first."""
        first, new = len(self._numbers), bytearray()
        runs: list[int] = []
        for digest in digests:
            number = self._numbers.setdefault(digest, len(self._numbers))
            if number == first + len(new) // DIGEST_BYTES:
                new += digest
            if runs and runs[-2] + runs[-1] == number:
                runs[-1] += 1
            else:
                runs += (number, 1)
        return np.array(runs, dtype=np.uint32), Pages(first, bytes(new)) if new else None


class RecordWriter:
    """One run of a recording, for one thread.

    Args:
        directory: of the recording; made where it is missing.
        header: its ``segment`` is filled in for each segment.
        max_bytes: budget on disk; the oldest segments are deleted beyond it.

    Raises:
        OSError: the directory cannot be written.
    """

    def __init__(self, directory: Path, header: Header, *, max_bytes: int) -> None:
        self._header = header
        self._store = SegmentStore(directory, max_bytes)
        self._start_segment()

    def write(self, record: Record, digests: Iterable[bytes] | None = None) -> None:
        """Adds a record.

        Args:
            record: without its ``pages``, where there are ``digests``. A header replaces the one before.
            digests: of the record's whole pages.
        """
        if self._store.is_full:
            self._start_segment()
        if isinstance(record, Header):
            self._header = record
            record = msgspec.structs.replace(record, segment=self._segment)
        if digests is not None:
            assert isinstance(record, RequestAdmitted | RequestFinished)
            runs, new = self._pages.runs(digests)
            if new is not None:
                self._append(new)
            record = msgspec.structs.replace(record, pages=runs)
        self._append(record)

    def flush(self) -> None:
        """What was written survives the process from here on."""
        self._store.flush()

    def close(self) -> None:
        """Closes the open segment."""
        self._store.close()

    def _append(self, record: Record) -> None:
        self._store.append(frame(encode(record)))

    def _start_segment(self) -> None:
        self._segment = self._store.open_next()
        self._pages = _PageNumbers()
        self._append(msgspec.structs.replace(self._header, segment=self._segment))
        self._store.flush()
        self._store.enforce_budget()

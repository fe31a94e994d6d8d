"""Writes a recording beside a running server: the scheduler only hands records over."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np

from sgl_importance.background.batch_worker import BatchWorker
from sgl_importance.nodes.digests import DIGEST_BYTES
from sgl_importance.trace.framing import frame
from sgl_importance.trace.records import (
    Dropped,
    Header,
    Pages,
    Record,
    RequestAdmitted,
    RequestFinished,
    Vector,
    encode,
)
from sgl_importance.trace.segments import SegmentStore
from sgl_importance.trace.token_sequence import TokenSequence

QUEUE_BYTES = 64 << 20
_RECORD_BYTES = 512  # of a record without its arrays, as Python objects
NO_PAGES: Vector = np.zeros(0, dtype=np.uint32)


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


class TraceWriter:
    """Takes records on the scheduler's thread and writes them on its own. Never blocks, never raises there.

    Memory is bounded: records that do not fit the queue are dropped and counted, and the gap is recorded.
    After an error of the disk nothing more is written, and the error is logged once.

    Args:
        directory: of the recording; made where it is missing.
        header: its ``segment`` is filled in for each segment.
        max_bytes: budget on disk; the oldest segments are deleted beyond it.
        queue_bytes: bound of the records that wait to be written.

    Raises:
        OSError: the directory cannot be written.
    """

    def __init__(
        self, directory: Path, header: Header, *, max_bytes: int, queue_bytes: int = QUEUE_BYTES
    ) -> None:
        self._header = header
        self._store = SegmentStore(directory, max_bytes)
        self._pages = _PageNumbers()
        self._start_segment()
        self._worker: BatchWorker[tuple[Record, TokenSequence | None]] = BatchWorker(
            "importance-trace",
            self._write_batch,
            max_bytes=queue_bytes,
            last_words="The KV importance trace ends here; the server goes on",
            resource=closing(self._store),
        )
        self._worker.start()

    @property
    def dropped(self) -> int:
        """Records that did not fit the queue, or came after the end of the writing."""
        return self._worker.dropped

    def put(self, record: Record, sequence: TokenSequence | None = None) -> bool:
        """Hands a record over; False where it was dropped.

        Args:
            record: its arrays must not change afterwards.
            sequence: whose pages become the record's ``pages``.
        """
        num_bytes = _RECORD_BYTES + sum(
            value.nbytes for value in msgspec.structs.astuple(record) if isinstance(value, np.ndarray)
        )
        if sequence is not None:
            num_bytes += 8 * len(sequence.tokens)
        return self._worker.offer((record, sequence), num_bytes)

    def close(self) -> None:
        """Writes the waiting records and closes the segment."""
        self._worker.close()

    # ---- the writer's thread ----

    def _write_batch(self, records: list[tuple[Record, TokenSequence | None]], refused: int) -> None:
        for record, sequence in records:
            self._write(record, sequence)
        if refused:
            self._append(Dropped(refused))
        self._store.flush()

    def _write(self, record: Record, sequence: TokenSequence | None) -> None:
        if self._store.is_full:
            self._start_segment()
        if sequence is not None:
            assert isinstance(record, RequestAdmitted | RequestFinished)
            runs, new = self._pages.runs(sequence.digests(self._header.page_size))
            if new is not None:
                self._append(new)
            record = msgspec.structs.replace(record, pages=runs)
        self._append(record)

    def _append(self, record: Record) -> None:
        self._store.append(frame(encode(record)))

    def _start_segment(self) -> None:
        number = self._store.open_next()
        self._pages = _PageNumbers()
        self._append(msgspec.structs.replace(self._header, segment=number))
        self._store.flush()
        self._store.enforce_budget()

"""Writes a recording beside a running server: the scheduler only hands records over."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np

from sgl_importance.background.batch_worker import BatchWorker
from sgl_importance.observe.trace.record_writer import RecordWriter
from sgl_importance.observe.trace.records import Dropped, Header, Record, Vector
from sgl_importance.observe.trace.token_sequence import TokenSequence

QUEUE_BYTES = 64 << 20
_RECORD_BYTES = 512  # of a record without its arrays, as Python objects
NO_PAGES: Vector = np.zeros(0, dtype=np.uint32)


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
        self._page_size = header.page_size
        self._records = RecordWriter(directory, header, max_bytes=max_bytes)
        self._worker: BatchWorker[tuple[Record, TokenSequence | None]] = BatchWorker(
            "importance-trace",
            self._write_batch,
            max_bytes=queue_bytes,
            last_words="The KV importance trace ends here; the server goes on",
            resource=closing(self._records),
        )
        self._worker.start()

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
            self._records.write(record, sequence.digests(self._page_size) if sequence is not None else None)
        if refused:
            self._records.write(Dropped(refused))
        self._records.flush()

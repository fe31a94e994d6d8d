"""Writes the ledger beside a running server: the scheduler only hands over records of a path."""

from __future__ import annotations

import logging
import queue
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sgl_importance.background.batch_worker import BatchWorker
from sgl_importance.background.daemon_pool import DaemonPool
from sgl_importance.ledger.ledger import Ledger, Worth
from sgl_importance.ledger.ledger_database import LedgerUnusable
from sgl_importance.ledger.pin_rows import MAX_SHARE
from sgl_importance.ledger.prefix_record import PrefixRecord
from sgl_importance.ledger.reuse_evidence import ReuseEvidence
from sgl_importance.ledger.steady_time import steady_time
from sgl_importance.pins.pin import Pin

logger = logging.getLogger(__name__)

QUEUE_BYTES = 64 << 20
BATCH_SECONDS = 0.5
"""From one transaction to the next: what a killed server loses, and how often a hot prefix is written."""
LOOK_SECONDS = 1.0
"""Longest time until an idle writer finds out that its file was taken away."""
RETRY_SECONDS = 30.0
"""Pause after a failed write, as on a full disk. Visits meanwhile are lost; the next visits repeat them."""
ANSWER_SECONDS = 0.05
"""Time limit of ``surviving_pins`` on a disk that hangs."""
_VISIT_BYTES = 256
# Another server holds the write lock; the batch waits for its turn.
_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@dataclass(frozen=True, slots=True)
class Visit:
    """The ledger's input from one finished request.

    Attributes:
        records: the nodes of its path.
        clock: requests admitted so far.
        namespace: of its tokens, as for ``root_digest``; None where there are no records.
        evidence: everything that was counted so far; None where nothing changed since the last visit.
    """

    records: Sequence[PrefixRecord]
    clock: int
    namespace: tuple[str | None, ...] | None
    evidence: ReuseEvidence | None


class LedgerWriter:
    """Takes visits on the scheduler's thread and writes them on its own. Never blocks, never raises there.

    Memory is bounded: visits that do not fit the queue are dropped and counted. Where the disk is full or
    cannot be written, one warning is logged and serving goes on. A file that is removed, moved away or
    replaced is made again, with its contents.

    Args:
        ledger: must have no other user from now on.
        budget_bytes: of the ledger's file.
        worth: ranks its rows; called on the writer's thread.
        clock: of the server now.
        evidence: that the server starts with.
        pins: that the ledger holds and the server too.
        queue_bytes: bound of the visits that wait to be written.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        budget_bytes: int,
        worth: Worth,
        clock: int,
        evidence: ReuseEvidence,
        pins: Iterable[Pin] = (),
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self._ledger = ledger
        self._budget_bytes = budget_bytes
        self._worth = worth
        self._clock = clock
        self._evidence = evidence
        self._pins = {pin.pin_id: pin for pin in pins}
        self._written_pins: dict[str, Pin] | None = self._pins
        self._rows: frozenset[str] = frozenset(self._pins)
        self.kept_pins = self._rows
        """Names of the pins that are in the file, as far as the writer knows: replaced, never changed."""
        self._lookers: DaemonPool | None = None
        self._look: queue.SimpleQueue[frozenset[str]] | None = None
        self._retry_at = 0.0
        self._has_warned = False
        self._has_told_of_pins = False
        self.written = 0
        """Records; for tests and reports."""
        self._worker: BatchWorker[Visit] = BatchWorker(
            "importance-ledger",
            self._write_batch,
            max_bytes=queue_bytes,
            last_words="KV importance ledger: nothing more is written; the server goes on",
            idle_seconds=LOOK_SECONDS,
            pause_seconds=BATCH_SECONDS,
            resource=self._closed_at_the_end(),
        )
        self._worker.start()

    @property
    def dropped(self) -> int:
        """Visits that did not fit the queue, or came after the end of the writing."""
        return self._worker.dropped

    def put(self, visit: Visit) -> bool:
        """Hands a visit over; False where it was dropped. Its records must not change afterwards."""
        num_bytes = _VISIT_BYTES + sum(record.num_bytes for record in visit.records)
        return self._worker.offer(visit, num_bytes)

    def keep_pins(self, pins: Iterable[Pin], clock: int) -> None:
        """Sets the pins, oldest first, that the file shall hold; a failed write is tried again later."""
        self._pins = {pin.pin_id: pin for pin in pins}
        self.put(Visit((), clock, None, None))

    def surviving_pins(self) -> frozenset[str]:
        """Names of the pins that a server which started now would find; none where the disk hangs.

        The writer notices within ``LOOK_SECONDS`` that its file is gone; this method looks at once. Call it
        from one thread only.
        """
        if self._look is not None:
            try:
                self._look.get_nowait()
            except queue.Empty:
                return frozenset()  # an earlier look hangs
        answer = self._look = queue.SimpleQueue()

        def look() -> None:
            held = self._ledger.place.is_held()
            # Read after it: the writer empties it before it makes a new file.
            answer.put(self.kept_pins if held else frozenset())

        if self._lookers is None:
            self._lookers = DaemonPool(1, "importance-ledger-look")
        self._lookers.submit(look)
        try:
            survivors = answer.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            return frozenset()
        self._look = None
        return survivors

    def close(self) -> None:
        """Writes the waiting visits and closes the ledger."""
        self._worker.close()

    # ---- the writer's thread ----

    @contextmanager
    def _closed_at_the_end(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.kept_pins = frozenset()  # the next start sets the file aside
            raise
        finally:
            self._ledger.close()

    def _write_batch(self, visits: Sequence[Visit], _dropped: int) -> None:
        if self._has_file() and (visits or self._pins is not self._written_pins):
            self._try(visits)

    def _has_file(self) -> bool:
        """Whether the ledger's file is at its path, where it may just have been made again."""
        if self._ledger.place.is_held():
            return True
        self.kept_pins, self._written_pins = frozenset(), None
        if time.monotonic() < self._retry_at and not self._worker.is_closing:
            return False
        try:
            if not self._ledger.take_place():
                return False
            # A copied file is complete; a file that another server began gets the evidence and pins it lacks.
            self._clock = min(self._clock, self._ledger.clock)
            if self._ledger.evidence() is None:
                self._evidence = ReuseEvidence.nothing()
            prefixes = len(self._ledger)
        except (LedgerUnusable, sqlite3.Error) as error:
            self._cannot_write(error)
            return False
        self._has_warned = False
        logger.warning(
            "KV importance ledger: %s was removed, moved away or replaced: there is one again, with %d "
            "prefixes; %d pins follow",
            self._ledger.path,
            prefixes,
            len(self._pins),
        )
        return True

    def _try(self, visits: Sequence[Visit]) -> None:
        while True:
            if time.monotonic() < self._retry_at:
                return
            try:
                self._write(visits)
                self._ledger.forget(self._budget_bytes, self._worth)
                return
            except sqlite3.Error as error:
                code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
                if code in _PASSING and not self._worker.is_closing:
                    continue  # SQLite has waited already
                if code in _DAMAGED:
                    raise
                self._cannot_write(error)

    def _cannot_write(self, error: Exception) -> None:
        self._retry_at = time.monotonic() + RETRY_SECONDS
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "KV importance ledger: %s cannot be written (%s): the server goes on without, and "
                "tries again every %.0f s; make room or make it writable",
                self._ledger.path,
                error,
                RETRY_SECONDS,
            )

    def _write(self, visits: Sequence[Visit]) -> None:
        records = {record.digest: record for visit in visits for record in visit.records}
        evidence = next((visit.evidence for visit in reversed(visits) if visit.evidence), None)
        clock = visits[-1].clock if visits else self._clock
        self._ledger.write(
            list(records.values()),
            clock=clock,
            requests=clock - self._clock,
            evidence=None if evidence is None else evidence.since(self._evidence),
            namespaces=dict.fromkeys(visit.namespace for visit in visits if visit.namespace is not None),
        )
        self._clock = clock
        self._evidence = evidence or self._evidence
        self.written += len(records)
        self._write_pins()
        if self._has_warned:
            self._has_warned = False
            logger.info("KV importance ledger: %s is written again", self._ledger.path)

    def _write_pins(self) -> None:
        pins = self._pins
        if pins is self._written_pins:
            return
        kept = self._ledger.pins.write(
            [pin for name, pin in pins.items() if name not in self.kept_pins],
            self._rows - pins.keys(),
            now=steady_time(),
            budget_bytes=self._budget_bytes,
        )
        self._rows = self.kept_pins = frozenset(kept) | (self.kept_pins & pins.keys())
        self._written_pins = pins
        if len(self.kept_pins) < len(pins) and not self._has_told_of_pins:
            self._has_told_of_pins = True
            logger.warning(
                "KV importance ledger: %d pins will not outlive the server: pins may fill %.0f %% of it; "
                "unpin some, or raise --kv-importance-ledger-megabytes",
                len(pins) - len(self.kept_pins),
                100 * MAX_SHARE,
            )

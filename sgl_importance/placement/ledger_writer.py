"""Writes the ledger beside a running server: the scheduler only hands over what it knows of a path."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sgl_importance.placement.evidence import ReuseEvidence
from sgl_importance.placement.ledger import Ledger, Worth
from sgl_importance.placement.pin import Pin
from sgl_importance.placement.pin_rows import MAX_SHARE
from sgl_importance.placement.record import PrefixRecord
from sgl_importance.trace.queue import BoundedQueue

logger = logging.getLogger(__name__)

QUEUE_BYTES = 64 << 20
BATCH_SECONDS = 0.5
"""From one transaction to the next: what a killed server loses, and how often a hot prefix is written."""
RETRY_SECONDS = 30.0
"""After a full disk, say. What comes in between is not written; it comes again with the next visit."""
_VISIT_BYTES = 256
# Another server holds the write lock; the batch waits for its turn.
_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@dataclass(frozen=True, slots=True)
class Visit:
    """What one finished request leaves for the ledger.

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

    Memory is bounded: what does not fit the queue is dropped and counted. Where the disk is full or cannot be
    written, one warning is logged and serving goes on.

    Args:
        ledger: whose only user this becomes.
        budget_bytes: of the ledger's file.
        worth: ranks its rows; called on the writer's thread.
        clock: of the server now.
        evidence: that the server starts with.
        pins: that the ledger holds and the server too.
        queue_bytes: bound of what waits to be written.
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
        self._queue: BoundedQueue[Visit] = BoundedQueue(queue_bytes)
        self._pins = {pin.pin_id: pin for pin in pins}
        self._written_pins = self._pins
        self.kept_pins: frozenset[str] = frozenset(self._pins)
        """Names of the pins that are in the file: replaced, never changed."""
        self._closing = threading.Event()
        self._retry_at = 0.0
        self._has_warned = False
        self._has_told_of_pins = False
        self.dropped = 0
        self.written = 0
        """Records; for tests and reports."""
        self._thread = threading.Thread(target=self._run, name="importance-ledger", daemon=True)
        self._thread.start()

    def put(self, visit: Visit) -> bool:
        """Hands a visit over; False where it was dropped. Its records must not change afterwards."""
        num_bytes = _VISIT_BYTES + sum(record.num_bytes for record in visit.records)
        taken = self._queue.offer(visit, num_bytes)
        self.dropped += not taken
        return taken

    def keep_pins(self, pins: Iterable[Pin], clock: int) -> None:
        """Says which pins, oldest first, the file shall hold. What cannot be written now is written later."""
        self._pins = {pin.pin_id: pin for pin in pins}
        self.put(Visit((), clock, None, None))

    def close(self) -> None:
        """Writes what waits and closes the ledger."""
        self._closing.set()
        self._queue.close()
        self._thread.join()

    # ---- the writer's thread ----

    def _run(self) -> None:
        try:
            while (taken := self._queue.take()) is not None:
                visits, _ = taken
                if visits:
                    self._try(visits)
                self._closing.wait(BATCH_SECONDS)
        except Exception:
            logger.exception("KV importance ledger: nothing more is written; the server goes on")
            self.kept_pins = frozenset()  # the next start sets the file aside
            self._queue.close()
        finally:
            self._ledger.close()

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
                if code in _PASSING and not self._closing.is_set():
                    continue  # SQLite has waited already
                if code in _DAMAGED:
                    raise
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
        clock = visits[-1].clock
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
            self.kept_pins - pins.keys(),
            now=time.time(),
            budget_bytes=self._budget_bytes,
        )
        self.kept_pins = frozenset(kept) | (self.kept_pins & pins.keys())
        self._written_pins = pins
        if len(self.kept_pins) < len(pins) and not self._has_told_of_pins:
            self._has_told_of_pins = True
            logger.warning(
                "KV importance ledger: %d pins will not outlive the server: pins may fill %.0f %% of it; "
                "unpin some, or raise --kv-importance-ledger-megabytes",
                len(pins) - len(self.kept_pins),
                100 * MAX_SHARE,
            )

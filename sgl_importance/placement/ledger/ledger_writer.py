"""Writes the ledger beside a running server: the scheduler only hands over records of a path."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sgl_importance.background.batch_worker import BatchWorker
from sgl_importance.background.daemon_pool import DaemonPool
from sgl_importance.placement.ledger.ledger import Ledger
from sgl_importance.placement.ledger.ledger_database import (
    LedgerBusy,
    LedgerDamaged,
    LedgerError,
    LedgerUnusable,
)
from sgl_importance.placement.ledger.pin_rows import MAX_SHARE
from sgl_importance.placement.ledger.prefix_record import PrefixRecord
from sgl_importance.placement.ledger.reuse_evidence import ReuseEvidence
from sgl_importance.placement.ledger.row_worth import Worth
from sgl_importance.placement.ledger.steady_time import steady_time
from sgl_importance.placement.pins.pin import Pin

logger = logging.getLogger(__name__)

QUEUE_BYTES = 64 << 20
BATCH_SECONDS = 0.5
"""From one transaction to the next: what a killed server loses, and how often a hot prefix is written."""
LOOK_SECONDS = 1.0
"""Longest time until an idle writer finds out that its ledger was taken away."""
RETRY_SECONDS = 30.0
"""Pause after a failed write, as on a full disk. Visits meanwhile are lost; the next visits repeat them."""
ANSWER_SECONDS = 0.05
"""Time limit of ``surviving_pins`` on a disk or a database that hangs."""
CLOSE_SECONDS = 30.0
"""Time limit of ``close`` on a disk or a database that hangs."""
_VISIT_BYTES = 256


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
    cannot be written, or the database is out of reach, one warning is logged, visits are counted as lost and
    serving goes on. A file that is removed, moved away or replaced is made again, with its contents; a
    database is used again once it answers.

    Args:
        ledger: must have no other user from now on.
        budget_bytes: of the ledger.
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
        self._failed: tuple[int, ReuseEvidence] | None = None
        """Clock and evidence with which the last write failed."""
        self._pins = {pin.pin_id: pin for pin in pins}
        self._written_pins: dict[str, Pin] | None = self._pins
        self._rows: frozenset[str] = frozenset(self._pins)
        self._kept = self._pins  # in the ledger, as far as the writer knows: replaced, never changed
        self._lookers: DaemonPool | None = None
        self._look: queue.SimpleQueue[frozenset[str]] | None = None
        self._retry_at = 0.0
        self._has_warned = False
        self._has_told_of_pins = False
        self._lost = 0
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
    def lost(self) -> int:
        """Visits that were not written: they did not fit the queue, or nothing could be written then."""
        return self._worker.dropped + self._lost

    @property
    def is_writing(self) -> bool:
        """Whether the last write succeeded, as far as the writer knows, and others may follow."""
        return not (self._has_warned or self._worker.is_closing)

    @property
    def kept_pins(self) -> frozenset[str]:
        """Names of the pins that are in the ledger, as far as the writer knows."""
        return frozenset(self._kept)

    def keeps(self, pin: Pin) -> bool:
        """Whether this pin is in the ledger: not an earlier one of its name."""
        return self._kept.get(pin.pin_id) is pin

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
            held = self._ledger.database.is_in_place()
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

    def take_no_more(self) -> None:
        """Drops visits from now on, and waits for nothing: the thread writes those that wait, and ends."""
        self._worker.take_no_more()

    def close(self) -> None:
        """Writes the waiting visits and closes the ledger; gives up after ``CLOSE_SECONDS``."""
        self._worker.close(CLOSE_SECONDS)

    # ---- the writer's thread ----

    @contextmanager
    def _closed_at_the_end(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._kept = {}  # the next start sets a file aside
            raise
        finally:
            self._ledger.close()

    def _write_batch(self, visits: Sequence[Visit], _dropped: int) -> None:
        if not (self._has_place() and self._try(visits)):
            self._lost += sum(bool(visit.records) for visit in visits)  # others bring pins, which are kept

    def _has_place(self) -> bool:
        """Whether the ledger is in its place, where it may just have been put again."""
        if self._ledger.database.is_in_place():
            return True
        self._kept, self._written_pins = {}, None
        if time.monotonic() < self._retry_at and not self._worker.is_closing:
            return False
        try:
            if not self._ledger.take_place():
                return False
            if self._failed is not None and self._ledger.is_kept_after_all:
                self._clock, self._evidence = self._failed
            self._failed = None
            # A copied file is complete; a file that another server began gets the evidence and pins it lacks.
            self._clock = min(self._clock, self._ledger.clock)
            if self._ledger.evidence() is None:
                self._evidence = ReuseEvidence.nothing()
            prefixes = len(self._ledger)
        except LedgerError as error:
            self._cannot_write(error)
            return False
        self._has_warned = False
        logger.warning(
            "KV importance ledger: %s %s, with %d prefixes; %d pins follow",
            self._ledger.place,
            self._ledger.database.return_notice,
            prefixes,
            len(self._pins),
        )
        return True

    def _try(self, visits: Sequence[Visit]) -> bool:
        """False where they are lost."""
        if not visits and self._pins is self._written_pins:
            return True
        is_written = False
        while True:
            if time.monotonic() < self._retry_at:
                return is_written
            try:
                if not is_written:
                    self._write(visits)
                    is_written = True
                self._ledger.forget(self._budget_bytes, self._worth)
                return True
            except LedgerDamaged:
                raise
            except LedgerError as error:
                if isinstance(error, LedgerBusy) and not self._worker.is_closing:
                    continue  # the database has waited already
                self._cannot_write(error)

    def _cannot_write(self, error: LedgerError) -> None:
        self._retry_at = time.monotonic() + RETRY_SECONDS
        if self._has_warned:
            return
        self._has_warned = True
        place, cure = self._ledger.place, self._ledger.database.cure
        # What cannot be opened says by itself what to do.
        is_complete = isinstance(error, LedgerUnusable)
        logger.warning(
            "KV importance ledger: %s; the server goes on without, and tries again every %.0f s",
            error if is_complete else f"{place} cannot be written ({error}): {cure}",
            RETRY_SECONDS,
        )

    def _write(self, visits: Sequence[Visit]) -> None:
        records = {record.digest: record for visit in visits for record in visit.records}
        evidence = next((visit.evidence for visit in reversed(visits) if visit.evidence), None)
        clock = visits[-1].clock if visits else self._clock
        self._failed = clock, evidence or self._evidence
        self._ledger.write(
            list(records.values()),
            clock=clock,
            requests=clock - self._clock,
            evidence=None if evidence is None else evidence.since(self._evidence),
            namespaces=dict.fromkeys(visit.namespace for visit in visits if visit.namespace is not None),
        )
        (self._clock, self._evidence), self._failed = self._failed, None
        self.written += len(records)
        self._write_pins()
        if self._has_warned:
            self._has_warned = False
            logger.info("KV importance ledger: %s is written again", self._ledger.place)

    def _write_pins(self) -> None:
        pins = self._pins
        if pins is self._written_pins:
            return
        # One that has ended may have a successor of its name already.
        replaced = {name for name, pin in pins.items() if name in self._kept and not self.keeps(pin)}
        added = self._ledger.pins.write(
            [pin for pin in pins.values() if not self.keeps(pin)],
            (self._rows - pins.keys()) | replaced,
            now=steady_time(),
            budget_bytes=self._budget_bytes,
        )
        self._kept = {name: pin for name, pin in pins.items() if name in added or self.keeps(pin)}
        self._rows = frozenset(self._kept)
        self._written_pins = pins
        if len(self._kept) < len(pins) and not self._has_told_of_pins:
            self._has_told_of_pins = True
            logger.warning(
                "KV importance ledger: %d pins will not outlive the server: pins may fill %.0f %% of it; "
                "unpin some, or raise ledger.megabytes of --kv-importance-config",
                len(pins) - len(self._kept),
                100 * MAX_SHARE,
            )

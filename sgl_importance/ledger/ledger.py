"""The ledger: facts of prefixes, reuse evidence and pins, from one start of a server to the next.

One SQLite file for any number of models, keyed by model identity. A row is a run of pages behind its parent
row, named by its chained digest, so rows of servers that cut their trees elsewhere still agree. Several
servers may write one file: a row holds the facts of its last writer, counts of reuse are added up.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sgl_importance.ledger.file_place import FilePlace
from sgl_importance.ledger.ledger_database import (
    LedgerUnusable,
    copy_to_place,
    is_damage,
    open_database,
    set_aside,
)
from sgl_importance.ledger.pin_rows import PinRows
from sgl_importance.ledger.prefix_record import (
    NAMES,
    UPSERT,
    PrefixRecord,
    RowDamaged,
    decode_row,
    encode_row,
)
from sgl_importance.ledger.reuse_evidence import ReuseEvidence
from sgl_importance.nodes.digests import root_digest

logger = logging.getLogger(__name__)

LEDGER_FILE = "ledger.sqlite"
MODEL_HALF_LIFE_SECONDS = 30 * 86400.0
"""Seconds after which rows of a model that no server loads are worth half."""
SLACK = 0.1
"""Part of the budget that is freed at once, so that not every batch has to rank the rows."""
_ROW_BYTES = 200  # of a row without its blobs, with its part of the indices
_PLACE_UNFIT = (
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN),
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED),
)

Worth = Callable[[int | None, int, int, int], float]
"""Seconds saved per KV byte, of (class, age in requests, tokens, tokens in front)."""


class Ledger:
    """The rows of one model in a ledger's file. Used by one thread at a time.

    Args:
        path: of the file.
        model: digest of the model and page size that the pages were computed with.
        page_size: tokens per page.
        keep_token_ids: False keeps only digests: pages are recognised when they come back, but nothing can
            be computed ahead of requests.

    Raises:
        LedgerUnusable: there is no ledger to be had.
    """

    def __init__(self, path: Path, model: bytes, *, page_size: int, keep_token_ids: bool = True) -> None:
        self.path = path
        self.model = model
        self.page_size = page_size
        self.keep_token_ids = keep_token_ids
        self.damaged_rows = 0
        self._namespaces: set[tuple[str | None, ...]] = set()
        self._open()

    def _open(self) -> None:
        for attempt in range(2):
            self._connection, self._lock = open_database(self.path)
            self.place = FilePlace(self.path)
            try:
                self._model = self._model_number(self.model)
                self.pins = PinRows(self._connection, self._model)
                self._counted_bytes, self._written_bytes = self.num_bytes, 0
                return
            except sqlite3.DatabaseError as error:
                if attempt or not is_damage(error):
                    self.close()
                    raise LedgerUnusable(f"{self.path}: {error}") from error
                # The check at the opening does not find every damage.
                logger.warning(
                    "KV importance ledger: %s is damaged (%s); %s", self.path, error, self.give_up()
                )

    def close(self) -> None:
        """Closes the file; the last connection also writes its log back into it."""
        self._connection.close()
        self._lock.release()

    def give_up(self) -> str:
        """Closes a damaged file and sets it aside; returns one line on what was done."""
        self._connection.close()
        try:
            if not self._lock.is_alone():
                return "another server uses it, so it stays where it is"
            return f"it is kept as {set_aside(self.path)}"
        except OSError as error:
            return f"it cannot be set aside ({error})"
        finally:
            self._lock.release()

    def take_place(self) -> bool:
        """Puts the file back at its path, after it was removed, moved away or replaced.

        A missing file is made anew, with everything that was in it. A file that is there by now (another
        server's, or a restored copy) is used as it is.

        Returns:
            False where another server is about to make it: ask again.

        Raises:
            LedgerUnusable: the directory or the file cannot be written.
            sqlite3.Error: there is no room for it just now.
        """
        self._lock.release()  # ``copy_to_place`` needs the lock for itself
        try:
            if not copy_to_place(self._connection, self.path):
                return False
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF in _PLACE_UNFIT:
                raise
            # The open file cannot be read, as after a network file system lost it. The new file is empty.
            logger.warning("KV importance ledger: nothing can be copied to %s (%s)", self.path, error)
        former, place = self._connection, self.place
        try:
            self._open()
        except BaseException:
            self._connection, self.place = former, place
            raise
        former.close()
        self._namespaces.clear()
        return True

    # ---- writing ----

    def write(
        self,
        records: Sequence[PrefixRecord],
        *,
        clock: int,
        requests: int,
        evidence: ReuseEvidence | None = None,
        namespaces: Iterable[tuple[str | None, ...]] = (),
    ) -> int:
        """Writes records of prefixes, in one transaction: all of them or none.

        Args:
            records: of different digests.
            clock: of the server now; the records' ``last_access`` are dated by it.
            requests: admitted since the last call.
            evidence: counted since the last call.
            namespaces: of the records' roots; kept where token ids are.

        Returns:
            The ledger's clock.

        Raises:
            sqlite3.Error: nothing was kept.
        """
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        try:
            (now,) = execute(
                "UPDATE models SET clock = clock + ?, used = ? WHERE id = ? RETURNING clock",
                (requests, time.time(), self._model),
            ).fetchone()
            rows = []
            for record in records:
                rows.append(self._row(record, now - (clock - record.last_access)))
                _let_others_run()
            self._connection.executemany(UPSERT, rows)
            if evidence is not None:
                self._add_evidence(evidence)
            new = [names for names in namespaces if names not in self._namespaces]
            if self.keep_token_ids:
                self._connection.executemany(
                    "INSERT OR IGNORE INTO namespaces VALUES (?, ?)",
                    ((root_digest(*names), json.dumps(names)) for names in new),
                )
            execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                execute("ROLLBACK")
            raise
        self._namespaces.update(new)
        self._written_bytes += sum(len(row[-3]) + len(row[-2]) + _ROW_BYTES for row in rows)
        return int(now)

    def _row(self, record: PrefixRecord, clock: int) -> tuple[Any, ...]:
        row = encode_row(record, page_size=self.page_size, clock=clock, keep_token_ids=self.keep_token_ids)
        return (self._model, *row)

    def _add_evidence(self, evidence: ReuseEvidence) -> None:
        known = self.evidence()
        merged = evidence if known is None else known.followed_by(evidence)
        self._connection.execute(
            "UPDATE models SET evidence = ? WHERE id = ?", (merged.to_bytes(), self._model)
        )

    # ---- reading ----

    @property
    def clock(self) -> int:
        """Requests that all servers of this model have admitted."""
        (clock,) = self._connection.execute(
            "SELECT clock FROM models WHERE id = ?", (self._model,)
        ).fetchone()
        return int(clock)

    def evidence(self) -> ReuseEvidence | None:
        """Reuse evidence; None where there is none, or it cannot be read."""
        (data,) = self._connection.execute(
            "SELECT evidence FROM models WHERE id = ?", (self._model,)
        ).fetchone()
        return None if data is None else ReuseEvidence.from_bytes(data)

    def prefixes(self, max_pages: int | None = None) -> Iterator[PrefixRecord]:
        """Rows of this model, last used first; damaged ones are left out and counted.

        Args:
            max_pages: stops before there are more.
        """
        rows = self._connection.execute(
            f"SELECT {NAMES}, checksum FROM prefixes WHERE model = ? ORDER BY clock DESC, depth",
            (self._model,),
        )
        pages = 0
        for row in rows:
            try:
                record = decode_row(row, page_size=self.page_size)
            except RowDamaged:
                self.damaged_rows += 1
                continue
            pages += record.tokens // self.page_size
            if max_pages is not None and pages > max_pages:
                return
            yield record

    def namespaces(self) -> dict[bytes, tuple[str | None, ...]]:
        """Extra key and cache salt by root digest."""
        rows = self._connection.execute("SELECT root, names FROM namespaces")
        named = {root: tuple(json.loads(names)) for root, names in rows}
        return {root: names for root, names in named.items() if root_digest(*names) == root}

    def __len__(self) -> int:
        (count,) = self._connection.execute(
            "SELECT count(*) FROM prefixes WHERE model = ?", (self._model,)
        ).fetchone()
        return int(count)

    # ---- the budget ----

    @property
    def num_bytes(self) -> int:
        """Of all rows. The file may be up to three times as large: SQLite leaves gaps between rows."""
        (size,) = self._connection.execute(
            f"SELECT sum(length(pages) + length(vectors) + {_ROW_BYTES}) FROM prefixes"
        ).fetchone()
        return int(size or 0) + self.pins.num_bytes

    def forget(self, budget_bytes: int, worth: Worth) -> int:
        """Brings the rows under their budget; those of least worth go first, none before its continuations.

        Args:
            budget_bytes: most bytes of all rows.
            worth: ranks rows of every model, each by its own model's clock.

        Returns:
            Rows that were forgotten.
        """
        if self._counted_bytes + self._written_bytes <= budget_bytes and (
            self._written_bytes <= SLACK * budget_bytes
        ):
            return 0
        # Rows that replaced others, and those of other servers, are seen only by counting.
        self._counted_bytes, self._written_bytes = self.num_bytes, 0
        if self._counted_bytes <= budget_bytes:
            return 0
        excess = self._counted_bytes - int((1 - SLACK) * budget_bytes)
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            deleted = []
            for number, size in self._least_worth(worth):
                deleted.append((number,))
                excess -= size
                self._counted_bytes -= size
                if excess <= 0:
                    break
            self._connection.executemany("DELETE FROM prefixes WHERE rowid = ?", deleted)
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        return len(deleted)

    def _least_worth(self, worth: Worth) -> Iterator[tuple[int, int]]:
        """(row, bytes), least worth first: a prefix is worth at least as much as any continuation."""
        clocks = {
            model: (clock, used)
            for model, clock, used in self._connection.execute("SELECT id, clock, used FROM models")
        }
        now = time.time()
        worths: dict[tuple[int, bytes], float] = {}
        rows = self._connection.execute(
            "SELECT rowid, model, digest, parent, depth, tokens, watched_as, clock, "
            "length(pages) + length(vectors) FROM prefixes ORDER BY depth DESC"
        ).fetchall()
        whole = np.empty(len(rows))
        for row, (_, model, digest, parent, depth, tokens, at_risk_as, clock, _) in enumerate(rows):
            model_clock, used = clocks[model]
            fading = 0.5 ** (max(now - used, 0.0) / MODEL_HALF_LIFE_SECONDS)
            own = fading * worth(at_risk_as, max(model_clock - clock, 0), tokens, depth)
            whole[row] = max(own, worths.get((model, digest), 0.0))
            worths[model, parent] = max(whole[row], worths.get((model, parent), 0.0))
            if row % 32 == 0:
                _let_others_run()
        # Rows come deepest first, and a stable sort leaves those of equal worth so.
        order = np.argsort(whole, kind="stable").tolist()
        return ((rows[row][0], rows[row][-1] + _ROW_BYTES) for row in order)

    def _model_number(self, identity: bytes) -> int:
        find = "SELECT id FROM models WHERE identity = ?", (identity,)
        if (known := self._connection.execute(*find).fetchone()) is None:  # else no write lock is needed
            self._connection.execute("INSERT OR IGNORE INTO models (identity) VALUES (?)", (identity,))
            known = self._connection.execute(*find).fetchone()
            if known is None:  # a damaged index knows a row that the table does not
                raise sqlite3.DatabaseError("its index contradicts its table")
        return int(known[0])


def _let_others_run() -> None:
    """Releases the interpreter lock, for which the scheduler's thread would otherwise wait 5 ms."""
    time.sleep(0)

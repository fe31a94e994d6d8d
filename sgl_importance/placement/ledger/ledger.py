"""The ledger: facts of prefixes, reuse evidence and pins, from one start of a server to the next.

One database for any number of models, keyed by model identity. A row is a run of pages behind its parent
row, named by its chained digest, so rows of servers that cut their trees elsewhere still agree. Several
servers may write one ledger: a row holds the facts of its last writer, counts of reuse are added up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sgl_importance.placement.ledger.ledger_database import LedgerDamaged, LedgerError, LedgerUnusable
from sgl_importance.placement.ledger.ledger_place import LedgerPlace, open_database
from sgl_importance.placement.ledger.namespace_rows import NamespaceRows
from sgl_importance.placement.ledger.pin_rows import PinRows
from sgl_importance.placement.ledger.prefix_record import (
    NAMES,
    ROW_BYTES,
    UPSERT,
    PrefixRecord,
    RowDamaged,
    decode_row,
    encode_row,
)
from sgl_importance.placement.ledger.reuse_evidence import ReuseEvidence
from sgl_importance.placement.ledger.row_worth import Worth, least_worth, let_others_run

logger = logging.getLogger(__name__)

SLACK = 0.1
"""Part of the budget that is freed at once, so that not every batch has to rank the rows."""


class Ledger:
    """The rows of one model in a ledger. Used by one thread at a time.

    Args:
        place: of the file or the database.
        model: digest of the model and page size that the pages were computed with.
        page_size: tokens per page.
        keep_token_ids: False keeps only digests: pages are recognised when they come back, but nothing can
            be computed ahead of requests.

    Raises:
        LedgerUnusable: there is no ledger to be had.
    """

    def __init__(
        self, place: LedgerPlace, model: bytes, *, page_size: int, keep_token_ids: bool = True
    ) -> None:
        self.place = place
        self.model = model
        self.page_size = page_size
        self.keep_token_ids = keep_token_ids
        self.damaged_rows = 0
        self.is_kept_after_all = False
        """Whether what ``write`` failed to write last was there when the place was taken again."""
        self._open()

    def _open(self) -> None:
        for attempt in range(2):
            self.database = open_database(self.place)
            try:
                self._model = self._model_number(self.model)
                self.pins = PinRows(self.database, self._model)
                self._namespaces = NamespaceRows(self.database)
                self._counted_bytes, self._written_bytes = self.num_bytes, 0
                return
            except LedgerError as error:
                if attempt or not isinstance(error, LedgerDamaged):
                    self.close()
                    raise LedgerUnusable(f"{self.place}: {error}") from error
                # The check at the opening does not find every damage.
                logger.warning(
                    "KV importance ledger: %s is damaged (%s); %s", self.place, error, self.give_up()
                )

    def close(self) -> None:
        self.database.close()

    def give_up(self) -> str:
        """Closes a ledger that cannot be read; returns one line on what became of it."""
        return self.database.give_up()

    def take_place(self) -> bool:
        """Opens the place again, which is not that of the open database any more.

        A file that was removed, moved away or replaced is made anew, with everything that was in it, where
        there is none by now. A file that is there (another server's, or a restored copy) and a database that
        was out of reach are used as they are.

        Returns:
            False where another server is about to make it: ask again.

        Raises:
            LedgerUnusable: the place cannot be used.
            LedgerError: there is no room for it just now.
        """
        if not self.database.prepare_return():
            return False
        former = vars(self).copy()
        try:
            self._open()
            in_doubt = former["database"].in_doubt
            self.is_kept_after_all = in_doubt is not None and self.database.was_kept(in_doubt)
        except BaseException:
            if self.database is not former["database"]:
                self.close()
            vars(self).update(former)  # all of it: the number of the model is of one database, as well
            raise
        former["database"].close()
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
            LedgerError: nothing was kept.
        """
        database = self.database
        with database.transaction():
            clocks = database.execute(
                "UPDATE models SET clock = clock + ?, used = ? WHERE id = ? RETURNING clock",
                (requests, time.time(), self._model),
            )
            if not clocks:
                raise LedgerDamaged("its model is gone")
            now = clocks[0][0]
            rows = []
            for record in records:
                rows.append(self._row(record, now - (clock - record.last_access)))
                let_others_run()
            database.execute_many(UPSERT, rows)
            if evidence is not None:
                self._add_evidence(evidence)
            names_bytes = self._namespaces.add(namespaces) if self.keep_token_ids else 0
        self._written_bytes += names_bytes + sum(len(row[-3]) + len(row[-2]) + ROW_BYTES for row in rows)
        return int(now)

    def _row(self, record: PrefixRecord, clock: int) -> tuple[Any, ...]:
        row = encode_row(record, page_size=self.page_size, clock=clock, keep_token_ids=self.keep_token_ids)
        return (self._model, *row)

    def _add_evidence(self, evidence: ReuseEvidence) -> None:
        known = self.evidence()
        merged = evidence if known is None else known.followed_by(evidence)
        self.database.execute(
            "UPDATE models SET life_tables = ? WHERE id = ?", (merged.to_bytes(), self._model)
        )

    # ---- reading ----

    @property
    def clock(self) -> int:
        """Requests that all servers of this model have admitted."""
        return int(self._of_model("clock"))

    def evidence(self) -> ReuseEvidence | None:
        """Reuse evidence; None where there is none, or it cannot be read."""
        data = self._of_model("coalesce(life_tables, evidence)")
        return None if data is None else ReuseEvidence.from_bytes(data)

    def prefixes(self, max_pages: int | None = None) -> Iterator[PrefixRecord]:
        """Rows of this model, last used first; damaged ones are left out and counted.

        Args:
            max_pages: stops before there are more.
        """
        rows = self.database.stream(
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
        return self._namespaces.read()

    def __len__(self) -> int:
        ((count,),) = self.database.execute("SELECT count(*) FROM prefixes WHERE model = ?", (self._model,))
        return int(count)

    def _of_model(self, column: str) -> Any:
        rows = self.database.execute(f"SELECT {column} FROM models WHERE id = ?", (self._model,))
        if not rows:
            raise LedgerDamaged("its model is gone")
        return rows[0][0]

    # ---- the budget ----

    @property
    def num_bytes(self) -> int:
        """Of all rows. A file may be up to three times as large: SQLite leaves gaps between rows."""
        ((size,),) = self.database.execute(
            f"SELECT sum(length(pages) + length(vectors) + {ROW_BYTES}) FROM prefixes"
        )
        return int(size or 0) + self.pins.num_bytes + self._namespaces.num_bytes

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
        deleted = []
        database = self.database
        with database.transaction(alone=True):
            # Another server may have forgotten meanwhile; no row need go for what none needs.
            self._counted_bytes = self.num_bytes - self._namespaces.unused_bytes
            excess = self._counted_bytes - int((1 - SLACK) * budget_bytes)
            is_over = self._counted_bytes > budget_bytes
            sizes = self._namespaces.sizes() if is_over else {}
            for row in least_worth(database, worth, root_bytes=sizes) if is_over else ():
                deleted.append((row.model, row.digest))
                excess -= row.num_bytes
                self._counted_bytes -= row.num_bytes
                if excess <= 0:
                    break
            database.execute_many("DELETE FROM prefixes WHERE model = ? AND digest = ?", deleted)
            self._namespaces.forget_unused()
        return len(deleted)

    def _model_number(self, identity: bytes) -> int:
        find = "SELECT id FROM models WHERE identity = ?", (identity,)
        if not (known := self.database.execute(*find)):  # else no write lock is needed
            self.database.execute(
                "INSERT INTO models (identity) VALUES (?) ON CONFLICT DO NOTHING", (identity,)
            )
            if not (known := self.database.execute(*find)):
                # A damaged index knows a row that the table does not.
                raise LedgerDamaged("its index contradicts its table")
        return int(known[0][0])

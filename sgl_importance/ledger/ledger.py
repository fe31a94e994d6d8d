"""The ledger: facts of prefixes, reuse evidence and pins, from one start of a server to the next.

One database for any number of models, keyed by model identity. A row is a run of pages behind its parent
row, named by its chained digest, so rows of servers that cut their trees elsewhere still agree. Several
servers may write one ledger: a row holds the facts of its last writer, counts of reuse are added up.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from sgl_importance.ledger.ledger_database import LedgerDamaged, LedgerError, LedgerUnusable
from sgl_importance.ledger.ledger_place import LedgerPlace, open_database
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

MODEL_HALF_LIFE_SECONDS = 30 * 86400.0
"""Seconds after which rows of a model that no server loads are worth half."""
SLACK = 0.1
"""Part of the budget that is freed at once, so that not every batch has to rank the rows."""
_ROW_BYTES = 200  # of a row without its blobs, with its part of the indices

Worth = Callable[[int | None, int, int, int], float]
"""Seconds saved per KV byte, of (class, age in requests, tokens, tokens in front)."""


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
        self._namespaces: set[tuple[str | None, ...]] = set()
        self._open()

    def _open(self) -> None:
        for attempt in range(2):
            self.database = open_database(self.place)
            try:
                self._model = self._model_number(self.model)
                self.pins = PinRows(self.database, self._model)
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
        former = self.database
        try:
            self._open()
        except BaseException:
            self.database = former
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
            LedgerError: nothing was kept.
        """
        database = self.database
        new = [names for names in namespaces if names not in self._namespaces]
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
                _let_others_run()
            database.execute_many(UPSERT, rows)
            if evidence is not None:
                self._add_evidence(evidence)
            if self.keep_token_ids:
                # In one order, so that no two servers wait for each other.
                database.execute_many(
                    "INSERT INTO namespaces VALUES (?, ?) ON CONFLICT DO NOTHING",
                    sorted((root_digest(*names), json.dumps(names)) for names in new),
                )
        self._namespaces.update(new)
        self._written_bytes += sum(len(row[-3]) + len(row[-2]) + _ROW_BYTES for row in rows)
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
        rows = self.database.execute("SELECT root, names FROM namespaces")
        named = {root: tuple(json.loads(names)) for root, names in rows}
        return {root: names for root, names in named.items() if root_digest(*names) == root}

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
            f"SELECT sum(length(pages) + length(vectors) + {_ROW_BYTES}) FROM prefixes"
        )
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
        deleted = []
        with self.database.transaction(alone=True):
            self._counted_bytes = self.num_bytes  # another server may have forgotten meanwhile
            excess = self._counted_bytes - int((1 - SLACK) * budget_bytes)
            for model, digest, size in self._least_worth(worth) if self._counted_bytes > budget_bytes else ():
                deleted.append((model, digest))
                excess -= size
                self._counted_bytes -= size
                if excess <= 0:
                    break
            self.database.execute_many("DELETE FROM prefixes WHERE model = ? AND digest = ?", deleted)
        return len(deleted)

    def _least_worth(self, worth: Worth) -> Iterator[tuple[int, bytes, int]]:
        """(model, digest, bytes), least worth first: a prefix is worth no less than any continuation."""
        clocks = {
            model: (clock, used)
            for model, clock, used in self.database.execute("SELECT id, clock, used FROM models")
        }
        now = time.time()
        worths: dict[tuple[int, bytes], float] = {}
        rows = self.database.execute(
            "SELECT model, digest, parent, depth, tokens, watched_as, clock, "
            "length(pages) + length(vectors) FROM prefixes ORDER BY depth DESC"
        )
        whole = np.empty(len(rows))
        for row, (model, digest, parent, depth, tokens, at_risk_as, clock, _) in enumerate(rows):
            model_clock, used = clocks[model]
            fading = 0.5 ** (max(now - used, 0.0) / MODEL_HALF_LIFE_SECONDS)
            own = fading * worth(at_risk_as, max(model_clock - clock, 0), tokens, depth)
            whole[row] = max(own, worths.get((model, digest), 0.0))
            worths[model, parent] = max(whole[row], worths.get((model, parent), 0.0))
            if row % 32 == 0:
                _let_others_run()
        # Rows come deepest first, and a stable sort leaves those of equal worth so.
        order = np.argsort(whole, kind="stable").tolist()
        return ((*rows[row][:2], rows[row][-1] + _ROW_BYTES) for row in order)

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


def _let_others_run() -> None:
    """Releases the interpreter lock, for which the scheduler's thread would otherwise wait 5 ms."""
    time.sleep(0)

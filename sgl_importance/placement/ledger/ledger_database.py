"""What a ledger asks of the database that keeps its tables, and what can go wrong with one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from sgl_importance.errors import ImportanceError

Row = tuple[Any, ...]


class LedgerError(ImportanceError):
    """A statement failed and changed nothing; the message says why."""


class LedgerUnusable(LedgerError):
    """There is no ledger to be had; the message says why."""


class LedgerBusy(LedgerError):
    """Another server writes just now: the same again will do."""


class LedgerDamaged(LedgerError):
    """The database does not hold what we wrote."""


class LedgerDatabase(Protocol):
    """An open database with the tables of ``ledger_schema``.

    Statements are those that SQLite and PostgreSQL share, with ``?`` for each value. Used by one thread at a
    time, but for ``is_in_place``.

    Attributes:
        cure: what to do where it cannot be written.
        return_notice: what a ledger that was out of place has gone through, once it is back.
        in_doubt: names the last transaction where nobody answered whether it is kept; None elsewhere.

    Raises:
        LedgerError: from every method that runs statements.
    """

    cure: str
    return_notice: str
    in_doubt: int | None

    def execute(self, statement: str, values: Sequence[Any] = ()) -> list[Row]:
        """Runs one statement; its rows, none where it has none."""

    def execute_many(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        """Runs one statement for each of the rows."""

    def stream(self, statement: str, values: Sequence[Any] = ()) -> Iterator[Row]:
        """Rows of a query that may not fit memory; no other statement may come between them."""

    def transaction(self, *, alone: bool = False) -> AbstractContextManager[None]:
        """All that runs in it is kept, or nothing.

        Args:
            alone: keeps every other transaction that asks for it waiting.
        """

    def was_kept(self, transaction: int) -> bool:
        """Whether a transaction that was in doubt is kept; asked of the database as it was opened anew."""

    def is_in_place(self) -> bool:
        """Whether a server that starts now would find what is written here. From any thread; may wait."""

    def prepare_return(self) -> bool:
        """Makes ready what must be there before the place can be opened again; False: ask again.

        Raises:
            LedgerUnusable: it cannot be made.
        """

    def give_up(self) -> str:
        """Closes a database that cannot be read; one line on what became of it."""

    def close(self) -> None:
        """Closes it; again does nothing."""

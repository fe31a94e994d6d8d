"""A ledger in a file of SQLite, which servers of one machine share."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sgl_importance.placement.ledger.ledger_database import LedgerBusy, LedgerDamaged, LedgerError, Row
from sgl_importance.placement.ledger.ledger_file import copy_to_place, is_damage, open_file, set_aside

logger = logging.getLogger(__name__)

_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_PLACE_UNFIT = (*_BUSY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)


class SqliteDatabase:
    """As ``LedgerDatabase``.

    Args:
        path: of the file.

    Raises:
        LedgerUnusable: the directory or the file cannot be used.
    """

    cure = "make room or make it writable"
    return_notice = "was removed, moved away or replaced: there is one again"
    in_doubt: int | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connection, self._lock = open_file(path)
        self._place = FilePlace(path)

    def execute(self, statement: str, values: Sequence[Any] = ()) -> list[Row]:
        with _our_errors():
            return self.connection.execute(statement, values).fetchall()

    def execute_many(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        with _our_errors():
            self.connection.executemany(statement, rows)

    def stream(self, statement: str, values: Sequence[Any] = ()) -> Iterator[Row]:
        with _our_errors():
            yield from self.connection.execute(statement, values)

    @contextmanager
    def transaction(self, *, alone: bool = False) -> Iterator[None]:
        """Every transaction has the file for itself, whatever ``alone`` says."""
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.execute("COMMIT")
        except BaseException:
            if self.connection.in_transaction:
                self.execute("ROLLBACK")
            raise

    def was_kept(self, transaction: int) -> bool:
        """None is ever in doubt."""
        return False

    def is_in_place(self) -> bool:
        """Whether opening the path now gives this file; waits for the disk."""
        return self._place.is_held()

    def prepare_return(self) -> bool:
        """Makes the file anew, with everything that was in it, where there is none by now.

        Returns:
            False where another server is about to make it: ask again.
        """
        self._lock.release()  # ``copy_to_place`` needs the lock for itself
        try:
            return copy_to_place(self.connection, self.path)
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF in _PLACE_UNFIT:
                raise _ours(error) from error
            # The open file cannot be read, as after a network file system lost it. The new file is empty.
            logger.warning("KV importance ledger: nothing can be copied to %s (%s)", self.path, error)
            return True

    def give_up(self) -> str:
        """Closes a damaged file and sets it aside."""
        self.connection.close()
        try:
            if not self._lock.is_alone():
                return "another server uses it, so it stays where it is"
            return f"it is kept as {set_aside(self.path)}"
        except OSError as error:
            return f"it cannot be set aside ({error})"
        finally:
            self._lock.release()

    def close(self) -> None:
        """Closes the file; the last connection also writes its log back into it."""
        self.connection.close()
        self._lock.release()


def _ours(error: sqlite3.Error) -> LedgerError:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code in _BUSY:
        return LedgerBusy(str(error))
    if isinstance(error, sqlite3.DatabaseError) and is_damage(error):
        return LedgerDamaged(str(error))
    return LedgerError(str(error))


@contextmanager
def _our_errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise _ours(error) from error


class FilePlace:
    """The place of a file that has just been opened.

    Args:
        path: of the file. While it is open its inode is in use, so no other file can be taken for it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened = _identity(path)

    def is_held(self) -> bool:
        """Whether opening the path now gives that file; waits for the disk."""
        return self._opened is not None and _identity(self._path) == self._opened


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino

"""The ledger's file: opened, checked, shared, and set aside where it cannot be read.

Every server holds a shared lock on ``<file>.lock`` while it has the file open. SQLite's own locks order what
they write; ours keeps one server from renaming a file that another one is using.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import stat
import time
from contextlib import closing, suppress
from pathlib import Path

from sgl_importance.placement.ledger.ledger_database import LedgerUnusable
from sgl_importance.placement.ledger.ledger_schema import (
    SCHEMA_VERSION,
    ColumnTypes,
    layout_problem,
    steps_from,
    version_problem,
)
from sgl_importance.storage.private_files import make_folder

logger = logging.getLogger(__name__)

APPLICATION_ID = 0x53474C49  # "SGLI"
BUSY_SECONDS = 5.0
WAL_BYTES = 16 << 20
_CURE = "make way for it, or name another directory with --kv-importance-ledger"
_SIDE_FILES = ("", "-wal", "-shm")

_TYPES = ColumnTypes(row_id="INTEGER PRIMARY KEY", integer="INTEGER", real="REAL", blob="BLOB")


class _Unreadable(Exception):
    """The file must be set aside; the message says why."""


class FileLock:
    """Lock that shows other processes of ours that a file is in use.

    Args:
        path: of the file that is in use; the lock is on one beside it.
    """

    def __init__(self, path: Path) -> None:
        beside = path.with_name(path.name + ".lock")
        _check_kind(beside)
        self._file = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._released = False
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def is_alone(self) -> bool:
        """Takes the file for this process only; False, and shared as before, where others use it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # A failed conversion may have given the shared lock away.
            fcntl.flock(self._file, fcntl.LOCK_SH)
            return False
        return True

    def share(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def release(self) -> None:
        """Gives the file back; again does nothing."""
        if not self._released:
            self._released = True
            os.close(self._file)


def open_file(path: Path) -> tuple[sqlite3.Connection, FileLock]:
    """Opens the ledger's file; makes it where it is missing.

    A file that is damaged, of another program or of another schema is renamed aside and a new one begun.

    Raises:
        LedgerUnusable: the directory or the file cannot be written, or another server uses a file that
            this one cannot read.
    """
    _check_kind(path)
    lock = _lock(path)
    try:
        try:
            return _connect(path), lock
        except _Unreadable as reason:
            if not lock.is_alone():
                raise LedgerUnusable(f"{path} is in use by another server, and {reason}") from reason
            aside = set_aside(path)
            logger.warning("KV importance ledger: %s; it is kept as %s and a new one begins", reason, aside)
        connection = _connect(path)
        lock.share()
        return connection, lock
    except OSError as error:
        lock.release()
        raise LedgerUnusable(f"{path}: {error.strerror}: {_CURE}") from error
    except (sqlite3.Error, _Unreadable) as error:
        lock.release()
        raise LedgerUnusable(f"{path}: {error}: {_CURE}") from error
    except LedgerUnusable:
        lock.release()
        raise


def copy_to_place(source: sqlite3.Connection, path: Path) -> bool:
    """Makes a ledger's file that was removed or moved away anew, with all that its open connection reads.

    Nothing is done where there is a file: of the servers that shared it one is the first, and the others
    open what it made.

    Args:
        source: to the file that is no longer at its path.
        path: where it was.

    Returns:
        False where another server holds the place and has not made its file yet: ask again.

    Raises:
        LedgerUnusable: the directory cannot be made or written.
        sqlite3.Error: the file cannot be read or written; none is left at the path.
    """
    lock = _lock(path)
    try:
        if path.exists():
            return True
        if not lock.is_alone():
            return path.exists()
        if not path.exists():
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            try:
                # One transaction of SQLite's: a process that is killed in it leaves an empty file.
                with closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as copy:
                    source.backup(copy)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        return True
    except OSError as error:
        raise LedgerUnusable(f"{path}: {error.strerror}: {_CURE}") from error
    finally:
        lock.release()


def is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether the file does not hold what we wrote, as opposed to being locked, full or forbidden.

    Our statements are fixed, so one that SQLite does not understand (a column is missing, say) is damage too.
    """
    if not isinstance(error, sqlite3.OperationalError):
        return True
    # An error in decoding text comes without a code.
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    return code in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT)


def set_aside(path: Path) -> Path:
    """Renames a ledger and its side files; returns the new name."""
    name = f"{path.name}.set-aside-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
    aside, number = path.with_name(name), 1
    while any(os.path.lexists(f"{aside}{suffix}") for suffix in _SIDE_FILES):
        number += 1
        aside = path.with_name(f"{name}-{number}")
    for suffix in _SIDE_FILES:
        with suppress(FileNotFoundError):
            os.replace(f"{path}{suffix}", f"{aside}{suffix}")
    return aside


def _lock(path: Path) -> FileLock:
    try:
        make_folder(path.parent)
        return FileLock(path)
    except OSError as error:
        raise LedgerUnusable(f"{error.filename or path.parent}: {error.strerror}: {_CURE}") from error


def _check_kind(path: Path) -> None:
    """Raises:
    LedgerUnusable: there is something at the path, and it is no file.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise LedgerUnusable(f"{path}: {error.strerror}: {_CURE}") from error
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "no file"
        raise LedgerUnusable(f"{path} is {kind}: {_CURE}")


def _connect(path: Path) -> sqlite3.Connection:
    if path.exists() and path.stat().st_size:
        _check(path)
    # It holds users' prompts: readable by its owner only. SQLite gives its log the same permissions.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    # Transactions are begun where they belong, not by the module.
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        _use_wal(connection)
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        _create_schema(connection)
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.DatabaseError) and is_damage(error):
            raise _Unreadable(f"{path} is damaged ({error})") from error
        raise
    return connection


def _use_wal(connection: sqlite3.Connection) -> None:
    """Servers that make a file at the same moment are refused by SQLite without any wait: they ask again."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            is_busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
            if not is_busy or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _create_schema(connection: sqlite3.Connection) -> None:
    if connection.execute("PRAGMA user_version").fetchone()[0] >= SCHEMA_VERSION:
        return  # without the write lock, which a busy server may hold for longer than our time limit
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        for reached, statements in steps_from(version, _TYPES):
            for statement in statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {reached}")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite ends it by itself where the disk is full
            connection.execute("ROLLBACK")
        raise


def _check(path: Path) -> None:
    """Raises:
    _Unreadable: this is no ledger that we can read.
    sqlite3.OperationalError: the file cannot be opened for writing just now.
    """
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)) as connection:
            # In one transaction: another server may write its schema between two of these.
            connection.execute("BEGIN")
            version: int = connection.execute("PRAGMA user_version").fetchone()[0]
            application: int = connection.execute("PRAGMA application_id").fetchone()[0]
            tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            connection.execute("COMMIT")
            if not tables and not version:
                return  # made by another server that has not written its schema yet
            if application != APPLICATION_ID:
                raise _Unreadable(f"{path} is the database of another program")
            if problem := version_problem(version):
                raise _Unreadable(f"{path} {problem}")
            (layout,) = connection.execute("SELECT reuse_layout FROM format").fetchone()
            if problem := layout_problem(layout):
                raise _Unreadable(f"{path} {problem}")
            (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise _Unreadable(f"{path} is damaged ({' '.join(verdict.split())})")
    except (sqlite3.DatabaseError, TypeError, ValueError) as error:
        if isinstance(error, sqlite3.DatabaseError) and not is_damage(error):
            raise
        raise _Unreadable(f"{path} is damaged ({error})") from error

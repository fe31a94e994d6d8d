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

from sgl_importance.reuse.life_table import NUM_AGE_BUCKETS
from sgl_importance.reuse.reuse_class import CLASSES_OF_END, visit_level

logger = logging.getLogger(__name__)

APPLICATION_ID = 0x53474C49  # "SGLI"
SCHEMA_VERSION = 2
_LEVELS = bytes(visit_level(2**power, 4**power) for power in range(12)).hex()
REUSE_LAYOUT = f"{CLASSES_OF_END} classes (visits {_LEVELS}) x {NUM_AGE_BUCKETS} age buckets"
"""Of the classes of unknown ends of answers, the only ones that earlier versions have. Classes of other ends
follow them in the evidence, if there are any."""
BUSY_SECONDS = 5.0
WAL_BYTES = 16 << 20
_CURE = "make way for it, or name another directory with --kv-importance-ledger"
_SIDE_FILES = ("", "-wal", "-shm")

_PINS = """
CREATE TABLE pins (
    id INTEGER PRIMARY KEY,
    model INTEGER NOT NULL REFERENCES models(id),
    pin_id TEXT NOT NULL,
    names TEXT NOT NULL,
    expires_at REAL,
    tokens BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    UNIQUE (model, pin_id)
);
"""
_SCHEMA = f"""
CREATE TABLE format (reuse_layout TEXT NOT NULL);
INSERT INTO format VALUES ('{REUSE_LAYOUT}');
CREATE TABLE models (
    id INTEGER PRIMARY KEY,
    identity BLOB NOT NULL UNIQUE,
    clock INTEGER NOT NULL DEFAULT 0,
    used REAL NOT NULL DEFAULT 0,
    evidence BLOB
);
CREATE TABLE namespaces (root BLOB PRIMARY KEY, names TEXT NOT NULL);
CREATE TABLE prefixes (
    model INTEGER NOT NULL REFERENCES models(id),
    digest BLOB NOT NULL,
    parent BLOB NOT NULL,
    depth INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    queries INTEGER NOT NULL,
    accesses INTEGER NOT NULL,
    span INTEGER NOT NULL,
    block_type INTEGER NOT NULL,
    watched_as INTEGER,
    clock INTEGER NOT NULL,
    used REAL NOT NULL,
    in_storage INTEGER NOT NULL,
    has_token_ids INTEGER NOT NULL,
    pages BLOB NOT NULL,
    vectors BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (model, digest)
);
CREATE INDEX prefixes_by_clock ON prefixes (model, clock);
{_PINS}
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""
_UPGRADES = {1: f"{_PINS} PRAGMA user_version = 2;"}
"""From an earlier schema to the next one, while servers of the earlier one may have the file open."""


class LedgerUnusable(Exception):
    """There is no ledger to be had; the message says why."""


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


def open_database(path: Path) -> tuple[sqlite3.Connection, FileLock]:
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
        raise LedgerUnusable(f"{path}: {error}") from error
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
    aside = path.with_name(f"{path.name}.set-aside-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}")
    for suffix in _SIDE_FILES:
        with suppress(FileNotFoundError):
            os.replace(f"{path}{suffix}", f"{aside}{suffix}")
    return aside


def _lock(path: Path) -> FileLock:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
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
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        _create_schema(connection)
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.DatabaseError) and is_damage(error):
            raise _Unreadable(f"{path} is damaged ({error})") from error
        raise
    return connection


def _create_schema(connection: sqlite3.Connection) -> None:
    if connection.execute("PRAGMA user_version").fetchone()[0] >= SCHEMA_VERSION:
        return  # without the write lock, which a busy server may hold for longer than our time limit
    connection.execute("BEGIN IMMEDIATE")
    try:
        while (version := connection.execute("PRAGMA user_version").fetchone()[0]) < SCHEMA_VERSION:
            statements = _UPGRADES[version] if version else _SCHEMA
            for statement in statements.split(";"):
                connection.execute(statement)
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _check(path: Path) -> None:
    """Raises:
    _Unreadable: this is no ledger that we can read.
    sqlite3.OperationalError: the file cannot be opened for writing just now.
    """
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)) as connection:
            version: int = connection.execute("PRAGMA user_version").fetchone()[0]
            application: int = connection.execute("PRAGMA application_id").fetchone()[0]
            tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if not tables and not version:
                return  # made by another server that has not written its schema yet
            if application != APPLICATION_ID:
                raise _Unreadable(f"{path} is the database of another program")
            if version != SCHEMA_VERSION and version not in _UPGRADES:
                age = "newer" if version > SCHEMA_VERSION else "older"
                raise _Unreadable(f"{path} has schema {version}, {age} than {SCHEMA_VERSION} of this version")
            (layout,) = connection.execute("SELECT reuse_layout FROM format").fetchone()
            if layout != REUSE_LAYOUT:
                raise _Unreadable(f"{path} counts reuse by {layout}, not by {REUSE_LAYOUT}")
            (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise _Unreadable(f"{path} is damaged ({' '.join(verdict.split())})")
    except (sqlite3.DatabaseError, TypeError, ValueError) as error:
        if isinstance(error, sqlite3.DatabaseError) and not is_damage(error):
            raise
        raise _Unreadable(f"{path} is damaged ({error})") from error

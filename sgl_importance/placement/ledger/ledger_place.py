"""Where a ledger is kept: a file of SQLite, or a database of PostgreSQL."""

from __future__ import annotations

from pathlib import Path

from sgl_importance.placement.ledger.ledger_database import LedgerDatabase, LedgerUnusable
from sgl_importance.placement.ledger.sqlite_database import SqliteDatabase
from sgl_importance.postgres_url import is_postgres_url

LEDGER_FILE = "ledger.sqlite"
DRIVER_MISSING = "PostgreSQL needs psycopg: pip install 'psycopg[binary]'"

LedgerPlace = Path | str
"""The path of a file, or the URL of a database."""


def place_of(option: str) -> LedgerPlace:
    """The place that ``--kv-importance-ledger`` names: a URL, or the file in a directory."""
    return option if is_postgres_url(option) else Path(option).expanduser().absolute() / LEDGER_FILE


def named_place(name: str) -> LedgerPlace:
    """The place that ``str`` made this of."""
    return name if is_postgres_url(name) else Path(name)


def address_problem(option: str) -> str | None:
    """What keeps ``--kv-importance-ledger`` from naming a database; None where nothing does."""
    if not is_postgres_url(option):
        return None
    try:
        from sgl_importance.placement.ledger.postgres_database import conninfo_problem
    except ImportError as error:
        return f"{DRIVER_MISSING} ({error})"
    return conninfo_problem(option)


def open_database(place: LedgerPlace) -> LedgerDatabase:
    """Opens the database of a place; makes what is missing there.

    Raises:
        LedgerUnusable: there is none to be had.
    """
    if isinstance(place, Path):
        return SqliteDatabase(place)
    try:
        from sgl_importance.placement.ledger.postgres_database import PostgresDatabase
    except ImportError as error:
        raise LedgerUnusable(f"{DRIVER_MISSING} ({error})") from error
    return PostgresDatabase(place)

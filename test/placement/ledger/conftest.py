"""Places for ledgers: what holds of one database holds of the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sgl_importance.placement.ledger.ledger_place import LedgerPlace


@pytest.fixture(scope="session", params=["sqlite", "postgresql"])
def new_place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], LedgerPlace]:
    """Makes an empty place; in PostgreSQL, what was in the one before is gone."""
    if request.param == "sqlite":
        return lambda: tmp_path_factory.mktemp("ledger") / "ledger.sqlite"
    postgres = request.getfixturevalue("postgres")

    def emptied() -> str:
        postgres.forget()
        return str(postgres.url)

    return emptied


@pytest.fixture
def place(new_place: Callable[[], LedgerPlace]) -> LedgerPlace:
    return new_place()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Of a ledger in SQLite, for what only files suffer."""
    return tmp_path / "ledger.sqlite"

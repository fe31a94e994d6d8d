"""A row of the ledger whose values are not those that were written is not knowledge."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

from support.workloads.ledger_rows import open_ledger, random_tree


@pytest.mark.parametrize(
    "change",
    ["accesses = accesses + 1", "queries = queries + 1", "vectors = zeroblob(length(vectors))"],
    ids=["accesses", "queries", "vectors"],
)
def test_a_changed_row_is_left_out_and_the_others_are_read(tmp_path: Path, change: str) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = open_ledger(path)
    ledger.write(random_tree(random.Random(2), 60), clock=100, requests=100)
    written = {each.digest for each in ledger.prefixes()}
    ledger.close()
    changed = max(written)
    with sqlite3.connect(path) as connection:
        updated = connection.execute(f"UPDATE prefixes SET {change} WHERE digest = ?", (changed,))
        assert updated.rowcount == 1
    connection.close()
    ledger = open_ledger(path)
    assert {each.digest for each in ledger.prefixes()} == written - {changed}
    assert ledger.damaged_rows == 1
    ledger.close()

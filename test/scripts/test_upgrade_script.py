"""scripts/upgrade: what is committed of an upgrade from 0.1.0, and, by night, the upgrade itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sgl_importance.options.moved_flags import MOVED_FLAGS

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "benchmark/results/upgrade.json"

Row = dict[str, Any]


def rows_of(path: Path, what: str) -> list[Row]:
    return [row for row in json.loads(path.read_text())["rows"] if row["what"] == what]


def check(path: Path) -> None:
    for row in rows_of(path, "flag"):
        assert row["known"] or MOVED_FLAGS[row["name"]] == row["said"], row
    for row in rows_of(path, "command"):
        assert row["known"] or row["said"].startswith("error: "), row
    (pin,), (ledger,), (pages,) = (rows_of(path, what) for what in ("pin", "ledger", "pages"))
    assert pin["kept"]
    assert ledger["after"]["is_written"]
    assert not ledger["set_aside"]
    assert pages["same_answers"] == pages["answers"] > 0
    assert pages["missed_pages"] == {}
    assert pages["from_storage_tokens"] > 0.9 * pages["asked_tokens"]
    (recording,) = rows_of(path, "recording")
    assert recording["info"]
    assert recording["replay"]


def test_what_is_committed_says_that_an_upgrade_keeps_everything() -> None:
    """And that this release still says what it said then of each old flag."""
    check(COMMITTED)


@pytest.mark.nightly
@pytest.mark.server
def test_an_upgrade_from_the_first_release(tmp_path: Path) -> None:
    out = tmp_path / "upgrade.json"
    command = [sys.executable, "-W", "ignore", "scripts/upgrade/run.py", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1800)
    check(out)
    (ledger,), (collected,) = rows_of(out, "ledger"), rows_of(out, "collected")
    for table, rows in ledger["before"]["rows"].items():
        assert ledger["after"]["rows"][table] >= rows, table
    assert collected["verify_is_clean"]
    assert collected["pages_before"] > 0
    assert collected["pages_left"] == 0

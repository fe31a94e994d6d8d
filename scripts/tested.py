"""Runs the tests that stand behind docs/generated/tested.md, and writes down what became of each row.

    python scripts/tested.py                         # every row, beside the installed sglang
    python scripts/tested.py test/models -k Gemma    # some of them: the other rows stay
    python scripts/tested.py --python .cache/versions/0.5.22/bin/python

A test names its row with the marker ``tested``. What it came to is read from pytest's report, never typed.
A release beside the pinned one is set up by ``scripts/versions.sh``. Ends with 1 where a test failed; its row
says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmark" / "results" / "tested.json"
KEY = ("kind", "name", "mode", "backend", "sglang")

Row = dict[str, Any]


def rows_of(report: Path, versions: dict[str, str]) -> Iterator[Row]:
    """The rows of a JUnit report; tests that were skipped have none.

    Args:
        report: written by ``pytest --junitxml``.
        versions: what the tests ran beside, by package.
    """
    root = ElementTree.parse(report).getroot()
    for case in root.iter("testcase"):
        named = [each.get("value") for each in case.iter("property") if each.get("name") == "tested"]
        if not named or case.find("skipped") is not None:
            continue
        failed = case.find("failure") is not None or case.find("error") is not None
        yield {
            **json.loads(named[0] or "{}"),
            **versions,
            "outcome": "failed" if failed else "passed",
            "test": f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}",
            "when": datetime.now(UTC).date().isoformat(),
        }


def merged(known: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Rows in the order of their keys. Where several tests stand behind one row, all of them must pass."""
    rows = {_key(row): row for row in known}
    fresh: dict[tuple[str, ...], Row] = {}
    for row in new:
        key = _key(row)
        if key not in fresh or row["outcome"] == "failed":
            fresh[key] = row
    return [row for _, row in sorted((rows | fresh).items())]


def _key(row: Row) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in KEY)


def installed(python: str) -> dict[str, str]:
    """The releases that an interpreter runs tests beside."""
    asked = "import json; from importlib.metadata import version as v"
    command = f"{asked}; print(json.dumps({{name: v(name) for name in ('sglang', 'torch')}}))"
    done = subprocess.run([python, "-W", "ignore", "-c", command], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"default: {RESULTS.relative_to(ROOT)}")
    chosen, tests = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        pytest = [chosen.python, "-W", "ignore", "-m", "pytest", "-q", "-m", "tested", f"--junitxml={report}"]
        subprocess.run([*pytest, *(tests or ["test"])], cwd=ROOT, check=False)
        if not report.exists():
            sys.exit("error: pytest wrote no report; its own lines say why")
        rows = list(rows_of(report, installed(chosen.python)))
    if not rows:
        sys.exit("error: no test with the marker 'tested' ran")
    known = json.loads(chosen.out.read_text())["rows"] if chosen.out.exists() else []
    document = {"command": "python scripts/tested.py", "rows": merged(known, rows)}
    chosen.out.write_text(json.dumps(document, indent=1) + "\n")
    failed = [row["test"] for row in rows if row["outcome"] == "failed"]
    print(f"{len(rows) - len(failed)} of {len(rows)} passed: {chosen.out}")
    if failed:
        sys.exit("error: " + "; ".join(failed))


if __name__ == "__main__":
    main()

"""The rows of all passes, kept in the JSON after each: a run that is cut off loses one row."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmark.results import rows_so_far, write_results

Row = dict[str, Any]
# Two rows with the same values of these are the same measurement.
KEY = ("pass", "workload", "arm", "device_tokens", "alternation", "document", "policy", "factor", "seed")
ROOT = Path(__file__).parents[2]


class Rows:
    """What the file has, and what is added; a row replaces the one that it measures again."""

    def __init__(self, path: Path, name: str = "serving") -> None:
        self._path = path
        self._name = name
        known = rows_so_far(path)
        self._rows: dict[tuple[Any, ...], Row] = {_key(row): row for row in known}
        self._commit = _commit()

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def add(self, row: Row) -> None:
        row = {**row, "commit": self._commit}
        self._rows[_key(row)] = row
        write_results(self._name, list(self), out=self._path)

    def have(self, **values: Any) -> bool:
        """Whether there is a row with these values."""
        return any(all(row.get(name) == value for name, value in values.items()) for row in self)


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in KEY)


def _commit() -> str:
    """What is measured: the last commit, marked where a Python file has changed since."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    return f"{commit}-dirty" if git("status", "--porcelain", "--", "*.py") else commit

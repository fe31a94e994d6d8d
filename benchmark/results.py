"""Writes benchmark results as JSON: what was run, on what kind of machine, and the rows."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _portable(argument: str) -> str:
    """A file's name in place of where it lies, or will, on the machine that ran the benchmark."""
    name, equals, path = argument.rpartition("=")
    is_place = os.sep in path and Path(path).parent.is_dir()
    return f"{name}{equals}{Path(path).name}" if is_place else argument


def write_results(name: str, rows: Sequence[dict[str, Any]], *, out: Path | None = None) -> Path:
    """Writes ``rows`` with the command and the versions that made them; returns the file."""
    path = out or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "benchmark": name,
        "command": shlex.join(["python", os.path.relpath(sys.argv[0]), *map(_portable, sys.argv[1:])]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()},
        "versions": {package: _version(package) for package in ("sgl-importance", "sglang", "torch")},
        "rows": list(rows),
    }
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(document, indent=1) + "\n")
    unfinished.replace(path)  # a run that is cut off leaves the rows of the one before
    return path


def rows_so_far(path: Path) -> list[dict[str, Any]]:
    """The rows that an earlier run has written; none where there was none."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def print_rows(title: str, rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)

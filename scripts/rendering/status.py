"""What works, what is pending and what is refused, from ``docs/data/status.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmark.serving.measured import table as _table
from scripts.rendering.reference import pinned, python_versions

_FILE = Path(__file__).resolve().parents[2] / "docs/data/status.json"


def _status() -> Any:
    return json.loads(_FILE.read_text())


def status_table(part: str) -> str:
    """The rows of one part."""
    rows = [each for each in _status()["parts"] if each["part"] == part]
    if not rows:
        raise ValueError(f"status.json has no part {part!r}")
    return _table(
        ["", "state", "evidence"],
        [[each["what"], f"**{each['state']}**", each["evidence"]] for each in rows],
    )


def pending_table() -> str:
    """What nobody has run yet, with the command that would settle it."""
    rows = [each for each in _status()["parts"] if each["state"] == "pending"]
    return _table(["pending", "settled by"], [[each["what"], f"`{each['settles']}`"] for each in rows])


def versions_table() -> str:
    """What everything here was run with; numbers are those of the pins."""
    lines = []
    for each in _status()["versions"]:
        is_python = each["name"] == "Python"
        version = python_versions() if is_python else pinned(each["name"])
        lines.append([each["name"], version, each["how"]])
    return _table(["", "version", "how"], lines)

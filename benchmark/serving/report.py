"""Table and figure of the serving benchmark, made from its rows."""

from __future__ import annotations

from typing import Any


def write_report(rows: list[dict[str, Any]], parameters: dict[str, Any]) -> None:
    pass

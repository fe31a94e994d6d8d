"""Tests that stand behind a row of "tested", by the marker of that name; their report names the row."""

from __future__ import annotations

import json

import pytest

MARKER = "tested"


def name_rows(items: list[pytest.Item]) -> None:
    """Puts each marked test's row into its report. Several markers make one row, the innermost last."""
    for item in items:
        if markers := list(item.iter_markers(MARKER)):
            row = {name: value for marker in reversed(markers) for name, value in marker.kwargs.items()}
            item.user_properties.append((MARKER, json.dumps(row)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    name_rows(items)

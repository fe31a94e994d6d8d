"""Keeps the process-wide rows of one test out of the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_importance.attention.rows import activate


@pytest.fixture(autouse=True)
def _no_rows_left_behind() -> Iterator[None]:
    yield
    activate(None)

"""Tables of all pages are tables: a blank line in one ends it, and what follows is shown as plain text."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from support.page_commands import PAGES, ROOT

BORDER = re.compile(r"\|(?: *:?-+:? *\|)+")


def stray_rows(text: str) -> list[int]:
    """Lines, from 1, that begin like the row of a table and stand in none."""
    lines = [
        "",
        *re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S).split(
            "\n"
        ),
    ]
    starts = [
        number
        for number, (before, line) in enumerate(pairwise(lines), start=1)
        if line.startswith("|") and not before.startswith("|")
    ]
    return [number for number in starts if not BORDER.fullmatch([*lines, ""][number + 1])]


def test_a_row_behind_a_blank_line_is_found() -> None:
    table = "| a | b |\n|---|:--|\n| 1 | 2 |\n"
    assert stray_rows(table) == []
    assert stray_rows(f"{table}\n| 3 | 4 |\n| 5 | 6 |\n\n{table}") == [5]
    assert stray_rows("```\n| 3 | 4 |\n```\n") == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_row_stands_in_a_table(page: Path) -> None:
    assert stray_rows(page.read_text()) == []

"""The README's figure of chosen pages shows the results that are stored."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmark.sparse.figure import FIGURE, draw


def texts(svg: Path) -> list[str]:
    return re.findall(r">([^<>\n]+)</text>", svg.read_text())


def test_the_figure_has_the_numbers_of_the_results(tmp_path: Path) -> None:
    draw(tmp_path / "pages.svg")
    shown = texts(tmp_path / "pages.svg")
    assert "16,384 tokens" in shown
    assert shown == texts(FIGURE), "run: python benchmark/sparse/figure.py"

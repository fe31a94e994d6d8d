"""docs/metrics.md shows the table in the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_importance.metrics import METRICS, as_markdown

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_shows_the_table():
    assert as_markdown() in PAGE.read_text(), "put the output of sgl_importance.metrics.as_markdown() there"


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_are_unique_and_carry_their_unit(metric):
    assert [other.name for other in METRICS].count(metric.name) == 1
    assert "_ms" not in metric.name
    assert ("seconds" in metric.name) == ("seconds" in metric.help), "base units only"
    assert metric.help[0].isupper() or metric.help.startswith("observe:")
    assert not metric.help.endswith(".")

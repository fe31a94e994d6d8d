"""The table of series that a server exports: docs/metrics.md is rendered from it."""

from __future__ import annotations

import pytest

from sgl_importance.metrics_table import METRICS


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_are_unique_and_carry_their_unit(metric):
    assert [other.name for other in METRICS].count(metric.name) == 1
    assert "_ms" not in metric.name
    assert ("seconds" in metric.name) == ("seconds" in metric.help), "base units only"
    assert metric.help[0].isupper() or metric.help.startswith("observe:")
    assert not metric.help.endswith(".")

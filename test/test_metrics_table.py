"""The table of series that a server exports: the page on metrics is built from it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts.rendering.pages import TEMPLATES, committed_pages
from sgl_importance.metrics_table import METRICS, PREFIX

ROOT = Path(__file__).parents[1]
PAGES = (*committed_pages(), TEMPLATES / "metrics.md", *filter(Path.is_file, ROOT.glob("monitoring/**/*")))


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_are_unique_and_carry_their_unit(metric):
    assert [other.name for other in METRICS].count(metric.name) == 1
    assert "_ms" not in metric.name
    assert ("seconds" in metric.name) == ("seconds" in metric.help), "base units only"
    assert metric.help[0].isupper() or metric.help.startswith("observe:")
    assert not metric.help.endswith(".")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_and_dashboard_name_series_that_there_are(page: Path):
    known = {name for metric in METRICS for name in (metric.exported_name, *metric.series)}
    for name, more in re.findall(rf"({PREFIX}\w*)([*{{.]?)", page.read_text()):
        begun = more and name.endswith("_")  # sglang:kv_importance_shadow_*, {offered,refused}_tokens_total
        assert name in known or (begun and any(each.startswith(name) for each in known)), name


def test_every_series_is_on_the_dashboard():
    panels = json.loads((ROOT / "monitoring" / "grafana.json").read_text())["panels"]
    queries = "\n".join(target["expr"] for panel in panels for target in panel.get("targets", ()))
    assert not [metric.name for metric in METRICS if f"{metric.series[0]}{{" not in queries]

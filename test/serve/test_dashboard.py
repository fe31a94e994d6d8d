"""The dashboard as Grafana's own library reads it: every field is one of its schema.

Grafana itself is neither on PyPI nor in Debian. Grafana Labs' Foundation SDK is made from its schemas.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

DASHBOARD = json.loads((Path(__file__).parents[2] / "monitoring" / "grafana.json").read_text())


def read_by_grafana(document: dict[str, Any]) -> dict[str, Any]:
    """What is left of a dashboard once it has been read and written."""
    register_default_plugins()  # which know the options of each type of panel, and of Prometheus' queries
    written: dict[str, Any] = json.loads(JSONEncoder().encode(Dashboard.from_json(document)))
    return written


def lost(sent: Any, read: Any, path: str = "") -> Iterator[str]:
    """Paths of what was sent and was not read as it was."""
    if isinstance(sent, dict) and isinstance(read, dict):
        for key, value in sent.items():
            yield from lost(value, read.get(key), f"{path}.{key}")
    elif isinstance(sent, list) and isinstance(read, list) and len(sent) == len(read):
        for place, (one, other) in enumerate(zip(sent, read, strict=True)):
            yield from lost(one, other, f"{path}[{place}]")
    elif sent != read:
        yield path


def test_grafana_reads_all_of_it():
    assert list(lost(DASHBOARD, read_by_grafana(DASHBOARD))) == []


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (lambda panel: panel, "gridPosition"),
        (lambda panel: panel["options"]["legend"], "displayModus"),
        (lambda panel: panel["fieldConfig"]["defaults"], "units"),
        (lambda panel: panel["fieldConfig"]["defaults"]["custom"], "fillOpacities"),
        (lambda panel: panel["targets"][0], "expression"),
    ],
)
def test_a_field_that_grafana_does_not_know_is_noticed(place: Any, name: str):
    broken = json.loads(json.dumps(DASHBOARD))
    panel = next(each for each in broken["panels"] if each["type"] == "timeseries")
    place(panel)[name] = 1
    assert [path.rpartition(".")[2] for path in lost(broken, read_by_grafana(broken))] == [name]


def test_panels_do_not_lie_on_each_other():
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells

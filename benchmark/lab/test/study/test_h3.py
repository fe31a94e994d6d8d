"""H3 on recordings made by hand: what is compared, and what the verdict says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sgl_importance_lab.study.cli import app
from sgl_importance_lab.study.h3 import ARMS, SELECTED, SLOTS, study_h3, verdict
from sgl_importance_lab.study.statistics import Estimate
from sgl_importance_lab.study.study_report import StudyError

from support.workloads.page_recordings import Asked, random_asked, recorded, write_asked

pytest.importorskip("torch")


def nearly_alike(difference: float) -> list[Asked]:
    """Tokens that want two pages more than ten others, in turn, by ``difference``."""
    found = []
    for number in range(5):
        mass = np.full((40, 1, 1, 45), 1e-4)
        for at in range(40):
            mass[at, 0, 0, 1:13] = 0.06
            mass[at, 0, 0, 1 + (at + number) % 12] += difference
            mass[at, 0, 0, 1 + (at + number + 1) % 12] += difference
        found.append(Asked(0, 30, mass))
    return found


def test_a_preference_pays_where_many_pages_are_worth_the_same(tmp_path: Path) -> None:
    recording = recorded(tmp_path, nearly_alike(0.0003), share=0.5)
    finding = study_h3([recording], processes=1)
    assert finding.verdict.startswith("supported for these lengths")
    assert finding.value.low > 0.3
    rows = {(row["policy"], row["bias"]): row for row in finding.rows}
    assert len(rows) == len(ARMS)
    assert rows["belady", 0]["loaded"] <= min(row["loaded"] for row in finding.rows if not row["bias"])
    assert rows["ema", 1]["loaded"] < rows["ema", 0]["loaded"]
    # A token reads at most four pages of one head.
    assert all(0 <= row["p50"] <= row["p95"] <= row["p99"] <= 4 for row in finding.rows)
    assert rows["ema", 1]["p95"] < rows["ema", 0]["p95"]
    assert any("these lengths only" in note for note in finding.notes)


def test_a_preference_that_reads_the_wrong_pages_is_not_supported(tmp_path: Path) -> None:
    finding = study_h3([recorded(tmp_path, nearly_alike(0.055), share=0.5)], processes=1)
    assert finding.verdict.startswith("not supported for these lengths")


@pytest.mark.parametrize(
    ("value", "covered", "expected"),
    [
        ((0.4, 0.35, 0.5), (1.0, 0.995, 1.0), "supported"),
        ((0.2, 0.1, 0.25), (1.0, 0.995, 1.0), "refuted"),
        ((0.3, 0.25, 0.4), (1.0, 0.995, 1.0), "undecided"),
        ((0.4, 0.35, 0.5), (0.99, 0.98, 1.0), "not supported"),
    ],
)
def test_the_verdict_is_that_of_both_intervals(
    value: tuple[float, ...], covered: tuple[float, ...], expected: str
) -> None:
    assert verdict(Estimate(*value, n=9), Estimate(*covered, n=9)).startswith(expected)


def test_lists_that_are_too_short_are_one_line(tmp_path: Path) -> None:
    recording = recorded(tmp_path, random_asked(0, requests=1, prompt_pages=30), share=0.05)
    with pytest.raises(StudyError, match="lists hold"):
        study_h3([recording], processes=1)


def test_the_command_writes_what_it_found(tmp_path: Path) -> None:
    write_asked(tmp_path / "lists", nearly_alike(0.0003), share=0.5)
    result = CliRunner().invoke(app, ["h3", str(tmp_path / "lists"), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "h3.json").read_text())
    assert document["recordings"][0]["requests"] == 5
    assert document["value"]["low"] > 0.3
    assert (tmp_path / "h3.png").stat().st_size > 0
    assert (SELECTED, SLOTS) == (0.1, 0.2)


def test_recordings_of_one_name_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for run in ("run1", "run2"):
        write_asked(tmp_path / run / "trace", nearly_alike(0.0003), share=0.5)
    result = CliRunner().invoke(app, ["h3", "run1/trace", "run2/trace"])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "h3.json").read_text())["rows"]
    assert len({(row["workload"], row["policy"], row["bias"]) for row in rows}) == 2 * len(ARMS)

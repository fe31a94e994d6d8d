"""What users and other programs wrote stands in tables as it is, also where rich would read it as markup."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

import sgl_importance
import sglang_importance
from sgl_importance.cli import fleet_command, pin_commands
from sgl_importance.observe.trace import cli as trace_cli
from sgl_importance.storage.tier_chain import store_command
from sgl_importance_lab.replay.lower_tiers.chain_replay import ChainRow
from sgl_importance_lab.replay.report.chain_report import chain_table
from sgl_importance_lab.study import study_report
from sgl_importance_lab.study.reuse_study import ReuseFinding
from sgl_importance_lab.study.statistics import Estimate
from sglang_importance.launch import doctor
from sglang_importance.launch.finding import Finding, Status

OUTSIDE = ["[/x]", "[tenant]", ":smile:", "[bold]x", "a\\"]
PIN = {
    "pin_id": "abc",
    "source": "requested",
    "tokens": 64,
    "granted_tokens": {"device": 64},
    "resident_tokens": 64,
    "strength": 1.0,
    "expires_in_seconds": None,
    "survives_restart": True,
}
MEMBER = {"policy": "importance", "hits": {"requests": 1}, "tiers": {}, "hit_rate": {}, "trouble": []}
PREFIX = {"prefix_tokens": 64, "tokens": 64, "uses": 1, "members": []}
CHAIN = (None, 1, 64, 64, 1.0, 1.0, 1.0, 1.0, 0.0, (), 1.0)
TABLES: dict[str, Callable[[str], Table]] = {
    "pins": lambda text: pin_commands._table([PIN | {"cache_salt": text}]),
    "fleet pins": lambda text: fleet_command._pins_table([PIN | {"cache_salt": text}], 1),
    "fleet show": lambda text: fleet_command._members_table([MEMBER | {"name": text}]),
    "hottest": lambda text: fleet_command._hottest_table([PREFIX | {"label": text, "cache_salt": None}]),
    "hottest's salts": lambda text: fleet_command._hottest_table(
        [PREFIX | {"label": "", "cache_salt": text}]
    ),
    "replay --tiers": lambda text: chain_table([ChainRow(text, "lru", False, *CHAIN)]),
}


def shown(table: Table) -> str:
    window = Console(width=200, record=True, file=StringIO())
    window.print(table)
    return window.export_text()


@pytest.mark.parametrize("text", OUTSIDE)
@pytest.mark.parametrize("name", TABLES)
def test_tables_show_it(name: str, text: str) -> None:
    assert text in shown(TABLES[name](text))


@pytest.mark.parametrize("text", OUTSIDE)
def test_a_study_shows_it(text: str) -> None:
    window = Console(width=200, record=True, file=StringIO())
    ReuseFinding(text, 9, 1, 0.5, (), Estimate(0, 0, 0, 9), ()).show(window)
    assert text in window.export_text()
    # Kinds of requests come from their ids, and into verdicts.
    study_report.Finding("heads", "claim", Estimate(0, 0, 0, 9), f"supported: {text}", (), ({"a": 1},)).show(
        window
    )
    assert f"verdict: supported: {text}" in window.export_text()


@pytest.mark.parametrize("text", OUTSIDE)
def test_commands_show_it(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"identity": "abc", "facts": {"weights_version": text}, "pages": 0, "bytes": 0, "last_used": 0}
    stored = {"models": [model], "quarantined": {}, "pages": 0, "bytes": 0}
    monkeypatch.setattr(store_command, "summarize", lambda _: stored)
    monkeypatch.setattr(trace_cli, "describe", lambda _: {"model": text})
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("disk", Status.OK, text)])
    commands: list[tuple[Any, list[str]]] = [
        (store_command.app, ["stat", str(tmp_path)]),
        (trace_cli.app, ["info", str(tmp_path)]),
        (doctor.app, []),
    ]
    for app, words in commands:
        result = CliRunner().invoke(app, words)
        assert text in result.output, (words, result.exception)
        assert result.exit_code == 0


def test_line_breaks_stay_within_a_cell() -> None:
    assert "a\\nb" in shown(TABLES["pins"]("a\nb"))


@pytest.mark.parametrize("package", [sgl_importance, sglang_importance], ids=lambda each: each.__name__)
def test_no_other_row_is_read_as_markup(package: Any) -> None:
    files = [file for folder in package.__path__ for file in Path(folder).rglob("*.py")]
    assert len(files) > 50
    assert [file.name for file in files if ".add_row(" in file.read_text()] in ([], ["terminal.py"])

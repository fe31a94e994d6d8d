"""What the laboratory announces, and what is said where it is not installed."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any

import pytest

from sgl_importance import laboratory
from sgl_importance.cli import main as cli
from sgl_importance.laboratory import COMMANDS, MissingControlError, load_control

PROJECT = tomllib.loads((Path(__file__).parents[1] / "benchmark/lab/pyproject.toml").read_text())["project"]


@pytest.fixture
def no_laboratory(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(**wanted: Any) -> EntryPoints:
        return EntryPoints(
            point
            for point in entry_points(**wanted)
            if point.dist is None or point.dist.name != "sgl-importance-lab"
        )

    monkeypatch.setattr(cli, "entry_points", without)
    monkeypatch.setattr(laboratory, "entry_points", without)


def run(*words: str, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    monkeypatch.setattr("sys.argv", ["sgl-importance", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def test_its_commands_are_known_by_name() -> None:
    assert set(COMMANDS) == set(PROJECT["entry-points"][cli.COMMANDS_GROUP])


@pytest.mark.usefixtures("no_laboratory")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_not_installed_says_in_one_line_how_to_get_it(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name, "trace.jsonl", "--no-such-flag", monkeypatch=monkeypatch) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        f"error: sgl-importance {name} is of the laboratory, which is not installed: "
        "pip install './benchmark/lab' in a clone of sgl-importance\n"
    )


@pytest.mark.usefixtures("no_laboratory")
def test_other_commands_need_no_laboratory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("doctor", "--help", monkeypatch=monkeypatch) == 0
    assert "Usage" in capsys.readouterr().out
    assert run("reply", monkeypatch=monkeypatch) == 2
    assert "No such command 'reply'" in capsys.readouterr().err


def test_each_control_arm_is_of_the_laboratory() -> None:
    pytest.importorskip("torch")  # in which selectors are written
    announced = PROJECT["entry-points"][laboratory.CONTROLS_GROUP]
    assert announced
    for name, value in announced.items():
        assert load_control(name) is EntryPoint(name, value, laboratory.CONTROLS_GROUP).load()


@pytest.mark.usefixtures("no_laboratory")
def test_a_control_arm_that_is_not_installed_names_the_cure() -> None:
    with pytest.raises(MissingControlError, match=r"not installed: pip install './benchmark/lab' in a clone"):
        load_control("shuffled")

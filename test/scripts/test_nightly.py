"""scripts/nightly.py and scripts/other_pythons.py: what they run, and what they write of it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pythons() -> Any:
    return load("other_pythons")


@pytest.fixture(scope="module")
def nightly(pythons: Any) -> Any:
    return load("nightly")


def test_the_core_s_tests_are_those_that_need_neither_sglang_nor_torch(pythons: Any) -> None:
    names = {str(path.relative_to(ROOT)) for path in pythons.core_tests()}
    for core in (
        "test/reuse/test_reuse.py",
        "test/policy/test_victim_order.py",
        "benchmark/lab/test/policies/test_agreement.py",
    ):
        assert (ROOT / core).is_file()
        assert core in names
    for other in (
        "plugin/test_flags.py",
        "serve/test_pins.py",
        "tree/test_tree_pins.py",
        "storage/test_backend.py",
    ):
        assert f"test/{other}" not in names


def test_an_interpreter_that_is_not_here_is_pending_with_its_command(pythons: Any) -> None:
    result = pythons.run_tests("3.99")
    assert result["outcome"] == "pending"
    assert "python scripts/other_pythons.py 3.99" in result["why"]
    here = "{}.{}".format(*sys.version_info)
    assert pythons.find_python(here) is not None


def test_a_failed_part_is_written_and_the_others_run(
    nightly: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nightly, "ROOT", tmp_path)
    monkeypatch.setattr(nightly, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sys, "argv", ["nightly.py", "--minutes", "0.5"])
    bad = nightly.timed(["python", "-c", "import sys; sys.exit(3)"])
    assert bad["outcome"] == "failed"
    assert nightly.timed(["python", "-c", "pass"])["outcome"] == "passed"
    monkeypatch.setattr(
        nightly,
        "RUN",
        {
            "tests": lambda minutes: [{"part": "tests", **bad}],
            "endurance": lambda minutes: [{"part": "endurance", "command": "soak", "outcome": "passed"}],
            "pythons": lambda minutes: [{"part": "pythons", "command": "3.99", "outcome": "pending"}],
            "mutations": lambda minutes: [{"part": "mutations", "command": "all", "outcome": "passed"}],
        },
    )
    with pytest.raises(SystemExit) as ended:
        nightly.main()
    assert ended.value.code == 1
    (file,) = (tmp_path / "results").iterdir()
    document = json.loads(file.read_text())
    assert file.stem == document["date"]
    assert [row["outcome"] for row in document["rows"]] == ["failed", "passed", "pending", "passed"]
    assert document["shortened"] is True
    assert document["endurance_minutes"] == 0.5
    assert "failed: python -c" in capsys.readouterr().err


def test_endurance_is_of_the_tree_and_of_three_servers(nightly: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def timed(command: list[str], *hidden: str) -> dict[str, Any]:
        asked.append(" ".join(command))
        return {"outcome": "passed"}

    monkeypatch.setattr(nightly, "timed", timed)
    assert len(nightly.run_endurance(40.0)) == len(asked) == 4
    (one, two_ranks, observe) = (each for each in asked if "--requests 100000" in each)
    assert "--max-seconds 2400" in one
    assert "--max-seconds 600 --dp-size 2" in two_ranks
    assert "--max-seconds 600 --policy observe" in observe


@pytest.mark.parametrize(
    "words", [["--only", "tests,poems"], ["--only", ""], ["--minutes", "0"], ["--minutes", "x"]]
)
def test_what_cannot_be_run_is_refused(
    nightly: Any, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["nightly.py", *words])
    with pytest.raises(SystemExit) as ended:
        nightly.main()
    assert ended.value.code == 2
    assert "error: argument" in capsys.readouterr().err

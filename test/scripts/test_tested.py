"""The rows of the page on what was tested come from pytest's report, a failure among them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.python_path import python_path

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.mark.tested(kind="family", name="A", backend="x")
@pytest.mark.parametrize("source", [pytest.param(0, marks=pytest.mark.tested(mode="m"))])
def test_one(source):
    assert not source

@pytest.mark.tested(kind="family", name="B", mode="m", backend="x")
def test_broken():
    assert False

@pytest.mark.tested(kind="family", name="B", mode="m", backend="x")
def test_whole():
    pass

@pytest.mark.tested(kind="family", name="C", mode="m", backend="x")
def test_skipped():
    pytest.skip("not here")

def test_no_row():
    pass
"""


@pytest.fixture(scope="module")
def tested() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tested", ROOT / "scripts" / "tested.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_are_what_pytest_reports(tested: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_rows.py").write_text(TESTS)
    report = tmp_path / "report.xml"
    command = (
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:schemathesis",
        "-p",
        "support.tested_rows",
        f"--junitxml={report}",
    )
    subprocess.run(
        [*command, "-W", "ignore", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, **python_path(ROOT / "test")},
        check=False,
    )
    rows = list(tested.rows_of(report, {"sglang": "1", "torch": "2"}))
    assert [(row["name"], row["mode"], row["outcome"]) for row in rows] == [
        ("A", "m", "passed"),
        ("B", "m", "failed"),
        ("B", "m", "passed"),
    ]
    assert rows[0]["test"].endswith("test_rows.py::test_one[0]")
    assert [(row["name"], row["outcome"]) for row in tested.merged([], rows)] == [
        ("A", "passed"),
        ("B", "failed"),
    ]
    mended = [{**rows[2], "when": "later"}]
    assert [row["outcome"] for row in tested.merged(tested.merged([], rows), mended)] == ["passed", "passed"]

"""scripts/mutations.py: its table fits the tree, and a line that nobody misses is reported."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import mutations
from scripts.mutations import BadTable, Mutation, chosen, kept_rows, problems, read_table, run


def test_every_line_of_the_table_is_there_once_and_so_are_its_tests() -> None:
    table = read_table()
    assert len(table) >= 24
    assert problems(mutations.ROOT, table) == []


PRICES = '''"""Prices."""


def total(prices):
    assert prices, "an order is never empty"
    return sum(prices)
'''
TEST_PRICES = """import prices


def test_prices_add_up():
    assert prices.total([1, 2]) == 3


def test_one_price_is_the_total():
    assert prices.total([5]) == 5
"""
ADDED = Mutation(
    name="sum",
    file="prices.py",
    line="return sum(prices)",
    broken="return max(prices)",
    breaks="orders are too cheap",
    tests=("test_prices.py",),
)
HARMLESS = dataclasses.replace(
    ADDED, name="empty", line='assert prices, "an order is never empty"', broken="pass"
)
NO_PYTHON = dataclasses.replace(ADDED, name="syntax", broken="return )")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "shop"
    root.mkdir()
    (root / "prices.py").write_text(PRICES)
    (root / "test_prices.py").write_text(TEST_PRICES)
    # A plugin that nothing here needs takes seconds to load.
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "-p no:schemathesis"\n')
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


def test_who_noticed_is_named_and_what_nobody_noticed_is_told(tree: Path) -> None:
    noticed, survived, no_python = run(tree, [ADDED, HARMLESS, NO_PYTHON])
    assert (noticed["outcome"], noticed["noticed_by"]) == ("noticed", "test_prices.py::test_prices_add_up")
    assert (survived["outcome"], survived["noticed_by"]) == ("survived", None)
    assert (no_python["outcome"], no_python["noticed_by"]) == ("not run", None)
    assert (tree / "prices.py").read_text() == PRICES


@pytest.mark.nightly
def test_tests_that_fail_without_a_broken_line_say_nothing(tree: Path) -> None:
    (tree / "prices.py").write_text(PRICES.replace("sum(prices)", "sum(prices) + 1"))
    with pytest.raises(BadTable, match=r"it does not pass: test_prices\.py::test_prices_add_up"):
        run(tree, [HARMLESS])


@pytest.mark.nightly
def test_a_test_that_hangs_is_ended_and_told(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutations, "RUN_SECONDS", 5)
    endless = dataclasses.replace(ADDED, name="endless", broken="while True: pass")
    (row,) = run(tree, [endless])
    assert (row["outcome"], row["noticed_by"]) == ("hung", None)
    assert (tree / "prices.py").read_text() == PRICES


@pytest.mark.nightly
def test_a_test_that_fails_already_costs_no_row_before_it(tree: Path) -> None:
    (tree / "test_wrong.py").write_text("def test_wrong():\n    assert False\n")
    rows: list[mutations.Row] = []
    with pytest.raises(BadTable, match="it does not pass: test_wrong"):
        run(tree, [ADDED, dataclasses.replace(HARMLESS, tests=("test_wrong.py",))], done=rows.append)
    assert [row["outcome"] for row in rows] == ["noticed"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"line": "return sum(price)"}, "sum: prices.py has its line 0 times, not once"),
        ({"line": "prices"}, "sum: prices.py has its line 3 times, not once"),
        ({"file": "costs.py"}, "sum: costs.py has its line 0 times, not once"),
        ({"broken": ADDED.line}, "sum: the broken line is the line itself"),
        ({"tests": ("test_costs.py",)}, "sum: there is no test_costs.py"),
        ({"tests": ("test_prices.py::test_one",)}, "sum: there is no test_prices.py::test_one"),
    ],
    ids=["changed line", "ambiguous line", "no file", "not broken", "no test file", "no test"],
)
def test_a_row_that_does_not_fit_is_refused(tree: Path, change: dict[str, object], problem: str) -> None:
    row = dataclasses.replace(ADDED, **change)
    assert problems(tree, [row]) == [problem]
    with pytest.raises(BadTable, match=problem):
        run(tree, [row])


def test_a_table_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    table = tmp_path / "table.toml"
    table.write_text('[[mutation]]\nname = "sum"\ntests = []\n')
    with pytest.raises(BadTable, match=r"table.toml: .*missing"):
        read_table(table)


def test_an_unknown_name_is_refused_with_the_choice() -> None:
    assert chosen([ADDED, HARMLESS], "empty") == [HARMLESS]
    with pytest.raises(BadTable, match="there is no mutation add: choose from sum, empty"):
        chosen([ADDED, HARMLESS], "sum, add")


@pytest.mark.parametrize(
    ("words", "is_written"), [([], True), (["--only", "empty"], False)], ids=["whole table", "some rows"]
)
def test_a_line_that_nobody_missed_ends_the_run_with_its_name(
    words: list[str], is_written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survived = {"mutation": "empty", "outcome": "survived", "noticed_by": None}
    monkeypatch.setattr(mutations, "read_table", lambda: [HARMLESS])
    monkeypatch.setattr(mutations, "run", lambda root, table, *, jobs, done: done(survived))
    out = tmp_path / "mutations.json"
    monkeypatch.setattr(sys, "argv", ["mutations.py", "--out", str(out), *words])
    with pytest.raises(SystemExit) as ended:
        mutations.main()
    assert ended.value.code == "error: no test noticed empty (survived)"
    assert out.exists() == is_written
    if is_written:
        assert json.loads(out.read_text())["rows"] == [survived]


@pytest.mark.nightly
def test_a_row_is_kept_until_something_of_it_changes(tree: Path, tmp_path: Path) -> None:
    results = tmp_path / "mutations.json"
    rows = run(tree, [ADDED, HARMLESS])
    results.write_text(json.dumps({"rows": rows}))
    assert kept_rows(results, tree, [ADDED, HARMLESS]) == {"sum": rows[0]}
    assert kept_rows(results, tree, [HARMLESS]) == {}
    assert kept_rows(results, tree, [dataclasses.replace(ADDED, broken="return 0")]) == {}
    for name in ("prices.py", "test_prices.py"):
        before = (tree / name).read_text()
        (tree / name).write_text(before + "\n")
        assert kept_rows(results, tree, [ADDED]) == {}
        (tree / name).write_text(before)
    assert kept_rows(results, tree, [ADDED]) == {"sum": rows[0]}
    assert kept_rows(tmp_path / "none.json", tree, [ADDED]) == {}


def test_what_only_a_nightly_test_notices_says_so(tree: Path) -> None:
    nightly = TEST_PRICES.replace(
        "import prices\n", "import prices, pytest\npytestmark = pytest.mark.nightly\n"
    )
    (tree / "test_every_night.py").write_text(nightly)
    row = dataclasses.replace(ADDED, tests=("test_every_night.py",))
    (noticed,) = run(tree, [row])
    assert (noticed["outcome"], noticed["run"]) == ("noticed", "nightly")
    (noticed,) = run(tree, [ADDED])
    assert (noticed["outcome"], noticed["run"]) == ("noticed", "daily")

"""What has run, from ``benchmark/results/tested.json``, which ``scripts/tested.py`` writes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmark.serving.measured import table as _table

_ROOT = Path(__file__).resolve().parents[2]
_FILE = _ROOT / "benchmark/results/tested.json"
_COMMAND = _ROOT / "docs/data/deepseek_command.json"


def _rows(kind: str) -> list[dict[str, Any]]:
    rows = [row for row in json.loads(_FILE.read_text())["rows"] if row["kind"] == kind]
    if not rows:
        raise ValueError(f"tested.json has no {kind}")
    return rows


def _releases(rows: list[dict[str, Any]]) -> str:
    outcomes: dict[str, bool] = {}
    for row in rows:
        outcomes[row["sglang"]] = outcomes.get(row["sglang"], True) and row["outcome"] == "passed"
    return ", ".join(release if passed else f"**{release} fails**" for release, passed in outcomes.items())


def _grouped(rows: list[dict[str, Any]], *names: str) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def tested_table(kind: str) -> str:
    """One line for each name of a kind: its ways, the backend, the releases beside which all passed, when.

    Ways that ran beside other releases have a line of their own.
    """
    lines = []
    for (name, backend), of_name in _grouped(_rows(kind), "name", "backend").items():
        by_releases: dict[str, list[dict[str, Any]]] = {}
        for of_way in _grouped(of_name, "mode").values():
            by_releases.setdefault(_releases(of_way), []).extend(of_way)
        for releases, rows in by_releases.items():
            ways = "; ".join(sorted({row["mode"] for row in rows}))
            tests = ", ".join(sorted({f"`{row['test'].partition('::')[0]}`" for row in rows}))
            last = min(row["when"] for row in rows)  # of all its ways
            lines.append([name, ways, f"`{backend}`", releases, last, tests])
    return _table(["", "how", "attention backend", "sglang", "last run", "test"], lines)


def tested_families() -> str:
    """The families that passed in every way that they were run in, as in a sentence."""
    groups = _grouped(_rows("family"), "name")
    passed = [name for (name,), rows in groups.items() if all(row["outcome"] == "passed" for row in rows)]
    return f"{', '.join(passed[:-1])} and {passed[-1]}"


def deepseek_command() -> str:
    """Each flag of a command that serves DeepSeek: what a launch says of it, and the test that has run it."""
    from sgl_importance.options.importance_options import ImportanceOptions
    from sglang_importance.launch.modes.arguments import refusals

    options = ImportanceOptions(policy="importance")
    rows = _rows("mode")
    lines = []
    for each in json.loads(_COMMAND.read_text()):
        refused = refusals(SimpleNamespace(**each["arguments"]), options)
        tests = {
            row["test"].partition("::")[0] for row in rows if row["name"].startswith(each.get("tested", "-"))
        }
        if refused:
            assert not tests, each["flag"]
            state, why = "refused", f"`{'; '.join(refused)}`"
        elif tests:
            state = "works"
            why = ", ".join(sorted(f"`{test}`" for test in tests))
        else:
            state = "pending"
            why = "`python scripts/tested.py test/modes`" if "tested" in each else "a GPU"
        lines.append([f"`{each['flag']}`", state, "; ".join(filter(None, (why, each.get("note", ""))))])
    return _table(["flag", "", "by what"], lines)

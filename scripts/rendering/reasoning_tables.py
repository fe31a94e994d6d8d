"""Tables of the embedded reasoning model: how far thoughts look back, and what was learnt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from benchmark.serving.measured import table
from scripts.rendering.figures import results
from sgl_importance_lab.reasoner import control_path, reasoner_path

_KINDS = {
    ("program", "operand"): "`program`: an operand's value",
    ("search", "seen"): "`search`: a neighbour was entered before",
    ("search", "return"): "`search`: where a node was entered from, at a dead end",
    ("search", "path"): "`search`: the same, reading back the path",
    ("state", "asked"): "`state`: where the node asked for was entered from",
}
_COLUMNS = {"to 16": (0, 16), "to 128": (17, 128), "to 512": (129, 512), "to 1,024": (513, 1024)}


def look_back_distances(length: int) -> str:
    """Look-backs per thought by their distance in tokens, in thoughts of about `length` tokens."""
    found = {
        (row["task"], row["kind"]): row for row in results("look_backs")["rows"] if row["length"] == length
    }

    def count(up_to: dict[str, int], low: int, high: int) -> int:
        return sum(n for bound, n in up_to.items() if bound != "more" and low <= int(bound) <= high)

    return table(
        ["what is read", "per thought", *_COLUMNS],
        [
            [
                label,
                f"{found[key]['per_thought']:.1f}",
                *(
                    f"{count(found[key]['up_to'], low, high) / found[key]['n']:.1f}"
                    for low, high in _COLUMNS.values()
                ),
            ]
            for key, label in _KINDS.items()
        ],
    )


def reasoner_training(control: bool = False) -> Mapping[str, Any]:
    """The record of a training run, kept beside its weights."""
    path = control_path() if control else reasoner_path()
    record: Mapping[str, Any] = json.loads((path / "training.json").read_text(encoding="utf-8"))
    return record


def reasoning_served_table() -> str:
    """Right final answers through a server, and the share of steps before a thought's first wrong one."""
    rows = results("reasoning_served")["rows"]
    lengths = sorted({row["length"] for row in rows})
    found = {(row["model"], row["task"], row["length"]): row for row in rows}

    def cell(row: Mapping[str, Any] | None) -> str:
        if row is None:
            return ""
        return f"{row['exact_match']:.2f} of {row['n']} ({row['steps_right']:.2f})"

    return table(
        ["", "task", *(f"{length:,} tokens" for length in lengths)],
        [
            [model, f"`{task}`", *(cell(found.get((model, task, length))) for length in lengths)]
            for model, task in dict.fromkeys(key[:2] for key in found)
        ],
    )


def reasoning_windows_table() -> str:
    """Right final answers where a token sees its prompt and so many tokens of the thought."""
    rows = results("reasoning_windows")["rows"]
    windows = sorted({row["window"] for row in rows if row["window"] is not None}, reverse=True)
    found = {(row["task"], row["length"], row["window"]): row for row in rows}
    cells = list(dict.fromkeys(key[:2] for key in found))
    return table(
        ["task", "thought", "n", "sees all", *(f"last {window}" for window in windows)],
        [
            [
                f"`{task}`",
                f"{length:,}",
                str(found[task, length, None]["n"]),
                *(f"{found[task, length, window]['exact_match']:.2f}" for window in (None, *windows)),
            ]
            for task, length in cells
        ],
    )


def retractions() -> str:
    """How many there were, of how many thoughts, and how many thoughts became others."""
    rows = [row for row in results("pages_interrupted")["rows"] if row["interruption"] == "retracted"]
    thoughts, same = (sum(row[name] for row in rows) for name in ("n", "same to the end"))
    retracted = sum(row["retractions"] for row in rows)
    return f"{retracted} retractions of {thoughts} thoughts, {thoughts - same} of which became others"


def right_thoughts(selector: str, budget: float) -> str:
    """Right thoughts where steps read a share of their context, chosen by a selector."""
    (row,) = (
        row
        for row in results("pages_thought_budgets")["rows"]
        if (row["selector"], row["budget"]) == (selector, budget)
    )
    return f"{row['right']} of {row['n']}"


def thought_budgets_table() -> str:
    """Right thoughts where steps read chosen pages, by selector and by the share of the context read."""
    rows = results("pages_thought_budgets")["rows"]
    shares = sorted({row["budget"] for row in rows})
    found = {(row["selector"], row["budget"]): row for row in rows}

    def cell(row: Mapping[str, Any]) -> str:
        return f"{row['right']} of {row['n']} ({row['same before']['value']:.2f})"

    return table(
        ["selector", *(f"{share:.0%} read" for share in shares)],
        [
            [f"`{selector}`", *(cell(found[selector, share]) for share in shares)]
            for selector in dict.fromkeys(row["selector"] for row in rows)
        ],
    )

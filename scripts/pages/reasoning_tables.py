"""Tables of the embedded reasoning model: how far thoughts look back, and what was learnt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmark.serving.measured import table
from scripts.pages.figures import results

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


def reasoner_training() -> Mapping[str, Any]:
    """The record of the training run."""
    record: Mapping[str, Any] = results("reasoner_training")
    return record


def reasoner_training_table() -> str:
    """Share of right replies, token for token, at each evaluation of the training run on record."""
    rows = reasoner_training()["evaluations"]
    cells = [(row["task"], row["length"]) for row in rows[-1]["evaluation"]]
    return table(
        ["steps", "minutes", *(f"`{task}`, {length:,}" for task, length in cells)],
        [
            [
                f"{row['step']:,}",
                f"{row['seconds'] / 60:.0f}",
                *(f"{each['right_replies']:.2f} ({each['right_tokens']:.3f})" for each in row["evaluation"]),
            ]
            for row in rows
        ],
    )

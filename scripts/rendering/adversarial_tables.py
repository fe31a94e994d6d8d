"""Tables of questions that are hard for selectors, and of what saves them, made of ``benchmark/results``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmark.serving.measured import table
from scripts.rendering.figures import results

BLIND_SPOTS = {
    "rep": "keys of a page that has more outlying ones than vectors are kept",
    "quest": "which page of many whose keys differ much: their boxes all promise much",
    "mean": "one key among the others of its page",
    "infllm": "one key among the others of its page, which has one vector: a block is read for it",
    "window": "all that is neither first nor last",
    "token": "what rounding to int8 hides",
    "oracle": "that a layer needs more pages than the budget: it knows their true attention",
}
"""What each selector cannot see."""


def _adversarial() -> dict[tuple[str, str, str], Mapping[str, Any]]:
    return {(row["selector"], row["mode"], row["case"]): row for row in results("pages_adversarial")["rows"]}


def _wrong(row: Mapping[str, Any]) -> int:
    return round((1 - row["right"]) * row["n"])


def overlooked(selector: str) -> str:
    """Wrong answers of all, without audits, over the cases that exact attention has right."""
    rows = [
        row
        for (name, mode, case), row in _adversarial().items()
        if (name, mode) == (selector, "none") and case != "decoys"
    ]
    return f"{sum(map(_wrong, rows))} of {sum(row['n'] for row in rows)}"


def exact_confidence() -> str:
    """Mean probability of right answers from exact attention, over the cases that it has right."""
    sure = [
        row["confidence_right"]
        for (name, _, case), row in _adversarial().items()
        if name == "all" and case != "decoys"
    ]
    return f"{min(sure):.3f} or more"


def blind_spots_table() -> str:
    """What each selector overlooks, how often it did where exact attention was right, and how surely."""
    rows = _adversarial()
    cases = [case for (selector, _, case) in rows if selector == "all" and case != "decoys"]

    def line(selector: str) -> list[str]:
        own = [rows[selector, "none", case] for case in cases if (selector, "none", case) in rows]
        count, asked = sum(map(_wrong, own)), sum(row["n"] for row in own)
        sure = sum(_wrong(row) * (row["confidence_wrong"] or 0.0) for row in own)
        pairs = [
            (row, rows[selector, "audit", row["case"]])
            for row in own
            if (selector, "audit", row["case"]) in rows
        ]
        saved = sum(_wrong(row) - _wrong(audited) for row, audited in pairs)
        return [
            f"`{selector}`",
            BLIND_SPOTS[selector],
            f"{count} of {asked}",
            f"{sure / count:.2f}" if count else "",
            f"{saved} of {sum(_wrong(row) for row, _ in pairs)}" if pairs else "",
        ]

    return table(
        ["selector", "cannot see", "wrong answers", "how sure of them", "of these, saved by audits"],
        [line(selector) for selector in BLIND_SPOTS if (selector, "none", "plain") in rows],
    )


def least_bound() -> float:
    """Smallest bound on the missed share that bounding boxes gave in any layer, of all questions."""
    return min(row["least_bound"] for row in results("pages_bounds")["rows"])

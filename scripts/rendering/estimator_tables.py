"""Tables of what was tried with the estimator, and of what learning costs."""

from __future__ import annotations

from typing import Any

from benchmark.serving.measured import table
from scripts.rendering.figures import results

_SHOWN = {
    "mooncake": "Mooncake",
    "agents, ends not told": "agents, ends not told",
    "all": "all six alike",
}


def _ratio(row: dict[str, Any]) -> str:
    if row["low"] is None:
        return f"{row['pooled']:.3f}"
    return f"{row['pooled']:.3f} ({row['low']:.3f} to {row['high']:.3f})"


def estimator_changes() -> str:
    """Computed blocks under each change over those of the estimator as it is, by traffic."""
    rows = [row for row in results("estimator")["rows"] if "pooled" in row]
    traffic = list(dict.fromkeys(row["traffic"] for row in rows))
    changes = list(dict.fromkeys(row["change"] for row in rows))
    found = {(row["change"], row["traffic"]): row for row in rows}
    return table(
        ["computed blocks over those as it is", *(_SHOWN.get(each, each) for each in traffic), "worst size"],
        [
            [
                change,
                *(_ratio(found[change, each]) for each in traffic),
                f"{max(found[change, each].get('worst_size', 0) for each in traffic):.3f}",
            ]
            for change in changes
        ],
    )


def shared_evidence(arm: str, requests: int) -> str:
    """Computed blocks of a server that hears of another's evidence over those of one that does not."""
    rows = results("shared_evidence")["rows"]
    (row,) = [each for each in rows if (each["arm"], each["requests"]) == (arm, requests)]
    return "{computed:.3f} ({low:.3f} to {high:.3f})".format(**row)


def learning_cost(running: int, what: str) -> str:
    """Microseconds of the scheduler that learning takes: of ``a_request``, or of ``a_step``."""
    (row,) = [each for each in results("learning_cost")["rows"] if each["running"] == running]
    return f"{row[what]:.0f}" if row[what] >= 10 else f"{row[what]:.1f}"


def learning_parts(running: int) -> str:
    """Microseconds of a request that the costliest of these calls take."""
    (row,) = [each for each in results("learning_cost")["rows"] if each["running"] == running]
    names = {
        "AnnotatedTree.removed": "two nodes that go, hashed for their ghosts",
        "ReuseTracker.created": "two that come",
        "ReuseEstimator.tick": "the clock and the index",
        "TurnTracker.finished": "the turn",
    }
    return ", ".join(f"{title} {row['parts'][name]:.0f}" for name, title in names.items())

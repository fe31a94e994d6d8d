"""The tables of a fleet, from ``benchmark/fleet.py``."""

from __future__ import annotations

from typing import Any

from benchmark.serving.measured import table as _table
from scripts.pages.figures import results


def _rows(study: str) -> list[dict[str, Any]]:
    return [row for row in results("fleet")["rows"] if row["study"] == study]


def fleet_faults_sentence() -> str:
    """How many answers were asked for under faults, how many were wrong, and the slowest."""
    rows = _rows("faults")
    asked, wrong = (sum(row[what] for row in rows) for what in ("asked", "wrong_tokens"))
    slowest = max(row["slowest_answer_seconds"] for row in rows)
    return (
        f"{len(rows)} faults, {asked} answers, {wrong} of them wrong, none later than {slowest:.1f} s "
        f"(sglang {results('fleet')['versions']['sglang']}, {results('fleet')['date']})."
    )


def fleet_faults_table() -> str:
    """By fault: what came from the store before, during and after it."""
    lines = [
        [
            row["store"],
            row["fault"],
            f"{row['wrong_tokens']} of {row['asked']}",
            f"{row['slowest_answer_seconds']:.2f} s",
            *(f"{row[f'from_store_{when}']:.0%}" for when in ("before", "during", "after")),
        ]
        for row in _rows("faults")
    ]
    titles = ["store", "fault", "wrong answers", "slowest answer", "from the store before", "during", "after"]
    return _table(titles, lines)


def fleet_sharing_table() -> str:
    """By what is shared: where prompt tokens were found, and what had to be computed."""
    lines = [
        [
            row["store"],
            *(f"{row[f'from_{tier}']:.1%}" for tier in ("device", "host", "storage")),
            f"{row['computed']:.1%}",
            f"{row['wrong_tokens']} of {row['requests']}",
        ]
        for row in _rows("sharing")
    ]
    titles = ["shared", "prompt tokens from the device", "host", "storage", "computed"]
    return _table([*titles, "wrong answers"], lines)

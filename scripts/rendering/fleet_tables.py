"""The tables of a fleet, from ``benchmark/fleet.py``."""

from __future__ import annotations

from typing import Any

from benchmark.serving.measured import table as _table
from scripts.rendering.figures import results


def _rows(study: str) -> list[dict[str, Any]]:
    return [row for row in results("fleet")["rows"] if row["study"] == study]


def fleet_faults_sentence() -> str:
    """How many answers were asked for under faults, how many were wrong, and the slowest."""
    rows = _rows("faults") + _rows("links")
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
        for row in _rows("faults") + _rows("links")
    ]
    titles = ["store", "fault", "wrong answers", "slowest answer", "from the store before", "during", "after"]
    return _table(titles, lines)


def fleet_router_sentence() -> str:
    """What clients got through the router while a server died and came back."""
    rows = _rows("router")
    asked, wrong, failed = (sum(row[what] for row in rows) for what in ("asked", "wrong_tokens", "failed"))
    slowest = max(row["slowest_answer_seconds"] for row in rows)
    stores = " and ".join(row["store"] for row in rows)
    return (
        "Four clients asked through it without a pause while one of two servers was killed (SIGKILL) and "
        f"came back (store: {stores}): {asked:,} answers, {wrong} wrong, {failed} errors, none later than "
        f"{slowest:.1f} s."
    )


def fleet_routed_sentence() -> str:
    """What the router saves, beside what sharing saves."""
    computed = {(row["store"], row["sent_by"]): row["computed"] for row in _rows("sharing")}
    return (
        f"By a coin, sharing a directory brings what is computed from {computed['nothing', 'coin']:.1%} to "
        f"{computed['directory', 'coin']:.1%} of the prompt tokens; the router alone, over servers that "
        f"share nothing, to {computed['nothing', 'router']:.1%}, and both together to "
        f"{computed['directory', 'router']:.1%}."
    )


def fleet_sharing_table() -> str:
    """By what is shared: where prompt tokens were found, and what had to be computed."""
    lines = [
        [
            row["store"],
            row["sent_by"],
            *(f"{row[f'from_{tier}']:.1%}" for tier in ("device", "host", "storage")),
            f"{row['computed']:.1%}",
            f"{row['busiest_server']:.0%}",
            f"{row['wrong_tokens']} of {row['requests']}",
        ]
        for row in _rows("sharing")
    ]
    titles = ["shared", "sent by", "prompt tokens from the device", "host", "storage", "computed"]
    return _table([*titles, "requests to the busier server", "wrong answers"], lines)

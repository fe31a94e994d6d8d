"""The table of the chain of storage tiers, from ``benchmark/tier_chain.py``."""

from __future__ import annotations

from typing import Any

from benchmark.serving.measured import table as _table
from scripts.pages.figures import results


def _rows() -> dict[tuple[str, float, str], dict[str, Any]]:
    return {(row["trace"], row["fraction"], row["policy"]): row for row in results("tier_chain")["rows"]}


def _change(ours: float, lru: float) -> str:
    return f"{(ours / lru - 1) * 100:+.1f}%"


def tier_chain_table() -> str:
    """By trace and size: what is computed again, fetched, waited for and paid, under both rankings."""
    rows = _rows()
    lines = []
    for trace, fraction, policy in rows:
        if policy != "importance":
            continue
        ours, lru, one = (rows[trace, fraction, each] for each in (policy, "lru", "lru, one tier"))
        lines.append(
            [
                trace.replace("_", " "),
                f"{fraction:.0%}",
                f"{ours['gigabytes'] / 1000:.1f}",
                *(f"{each['recomputed_share']:.3f}" for each in (one, lru, ours)),
                _change(ours["recomputed_share"], lru["recomputed_share"]),
                *(f"{each['fetch_microseconds_per_token']:.1f}" for each in (one, lru, ours)),
                _change(ours["fetch_microseconds_per_token"], lru["fetch_microseconds_per_token"]),
                *(f"{each['ttft_times_faster_than_computing']:.2f}" for each in (lru, ours)),
                *(f"{1 - each['price'] / each['price_of_computing_all']:.0%}" for each in (lru, ours)),
            ]
        )
    titles = ["trace", "of unique", "TB", "computed: one tier, LRU", "chain, LRU", "chain, ours", ""]
    titles += ["us a token: one tier, LRU", "chain, LRU", "chain, ours", ""]
    return _table([*titles, "TTFT, times faster: LRU", "ours", "price saved: LRU", "ours"], lines)


def tier_chain_changes(what: str, *, least: bool) -> str:
    """The least or the greatest change from LRU to ours over all rows, of ``recomputed_share`` or another."""
    rows = _rows()
    found = [
        row[what] / rows[trace, fraction, "lru"][what] - 1
        for (trace, fraction, policy), row in rows.items()
        if policy == "importance"
    ]
    return f"{(min(found) if least else max(found)) * 100:+.1f}%"


def tier_chain_met(what: str, by: float) -> int:
    """Traces on which ours is lower than LRU by at least the share ``by`` at one of the sizes."""
    rows = _rows()
    return len(
        {
            trace
            for (trace, fraction, policy), row in rows.items()
            if policy == "importance" and row[what] <= (1 - by) * rows[trace, fraction, "lru"][what]
        }
    )

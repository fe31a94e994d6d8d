"""The table of the chain of storage tiers, from ``benchmark/tier_chain.py``."""

from __future__ import annotations

from typing import Any

from benchmark.serving.measured import table as _table
from scripts.rendering.figures import results


def _rows() -> dict[tuple[str, float, str], dict[str, Any]]:
    return {(row["trace"], row["fraction"], row["policy"]): row for row in results("tier_chain")["rows"]}


def _change(ours: float, lru: float) -> str:
    return f"{(ours / lru - 1) * 100:+.1f}%"


def _recomputed(ours: dict[str, Any], lru: dict[str, Any]) -> str:
    """The change of recomputed tokens, with an interval where sessions began in several orders."""
    if "recomputed_over_lru" not in ours:
        return _change(ours["recomputed_share"], lru["recomputed_share"])
    mean, low, high = (f"{(ratio - 1) * 100:+.1f}" for ratio in ours["recomputed_over_lru"])
    return f"{mean}% ({low} to {high})"


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
                _recomputed(ours, lru),
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


def tier_chain_common(trace: str, fraction: float) -> str:
    """Microseconds a token that both find takes: under LRU and under ours."""
    rows = _rows()
    lru, ours = (
        rows[trace, fraction, policy]["common_fetch_microseconds_per_token"]
        for policy in ("lru", "importance")
    )
    return f"{ours:.1f} instead of {lru:.1f} us ({_change(ours, lru)})"


def hot_prefix_ratio() -> str:
    """First token of a prompt on the device: with a chain of tiers over without storage, and its interval."""
    (row,) = results("hot_prefix")["rows"]
    return f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


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


def tier_chain_claims() -> str:
    """Figures of the paper on six tiers beside ours over all rows: from the lowest to the highest."""
    rows = _rows()
    ours = [row for (_, _, policy), row in rows.items() if policy == "importance"]
    beside = {
        policy: [rows[row["trace"], row["fraction"], policy] for row in ours]
        for policy in ("lru", "lru, one tier")
    }

    def ratios(what: str, policy: str) -> list[float]:
        return [other[what] / row[what] for row, other in zip(ours, beside[policy], strict=True)]

    def saved(policy: str) -> list[float]:
        return [1 - row["price"] / other["price"] for row, other in zip(ours, beside[policy], strict=True)]

    def hits(policy: str) -> str:
        return _span([1 - row["recomputed_share"] for row in beside[policy]], "{:.0%}")

    times, share = "{:.2f}", "{:.0%}"
    lines = [
        ["prompt tokens found", "70 to 84%", _span([1 - row["recomputed_share"] for row in ours], share)]
        + [f"LRU: {hits(policy)}" for policy in ("lru, one tier", "lru")],
        ["first token, times sooner", "1.4 to 2.1"]
        + [_span([row["ttft_times_faster_than_computing"] for row in ours], times)]
        + [_span(ratios("ttft_mean", policy), times) for policy in ("lru, one tier", "lru")],
        ["prefill throughput, times, if fetching hides behind computing", "1.7 to 2.9"]
        + [_span([1 / row["recomputed_share"] for row in ours], times)]
        + [_span(ratios("recomputed_share", policy), times) for policy in ("lru, one tier", "lru")],
        ["cost saved", "47%"]
        + [_span([1 - row["price"] / row["price_of_computing_all"] for row in ours], share)]
        + [_span(saved(policy), share) for policy in ("lru, one tier", "lru")],
    ]
    titles = ["", "the paper", "beside computing all", "beside one tier, LRU", "beside LRU in every tier"]
    return _table(titles, lines)


def _span(values: list[float], form: str) -> str:
    # What is rounded to nothing is no loss.
    low, high = (form.format(value).replace("-0%", "0%") for value in (min(values), max(values)))
    return f"{low} to {high}"

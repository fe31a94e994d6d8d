"""Tables of the serving benchmark on recorded agents, made from its rows and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from benchmark.serving.arms import STOCK
from benchmark.serving.measured import bootstrap, paired_ratios, table
from benchmark.serving.rows import Row

WORKLOAD = "agents"
VALUES = {
    "uncached_tokens": "uncached tokens",
    "ttft_mean": "TTFT mean",
    "ttft_p50": "TTFT p50",
    "ttft_p95": "TTFT p95",
    "requests_per_second": "requests/s",
    "cpu_seconds": "CPU time",
}
SHARE_GOAL, FITS_GOAL = 0.8, 1.02


def _arms(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Pass and arm of all rows that are compared with stock."""
    return list(dict.fromkeys((row["pass"], row["arm"]) for row in rows if row["arm"] != STOCK))


def ratios(rows: Sequence[Row]) -> str:
    """To stock LRU, by pass and arm: median of the alternations, with its 95 % interval."""
    lines = []
    for measured_by, arm in _arms(rows):
        found = {
            value: paired_ratios(rows, WORKLOAD, arm, value, measured_by=measured_by) for value in VALUES
        }
        cells = ["{:.3f} ({:.3f} to {:.3f})".format(*bootstrap(each)) for each in found.values()]
        lines.append([measured_by, arm, str(len(found["ttft_mean"])), *cells])
    return table(["pass", "arm", "alternations", *VALUES.values()], lines)


def stock(rows: Sequence[Row]) -> str:
    """What the ratios are to: medians of the alternations."""
    lines = []
    for measured_by in dict.fromkeys(row["pass"] for row in rows):
        own = [row for row in rows if (row["pass"], row["arm"]) == (measured_by, STOCK)]
        medians = [bootstrap([row[value] for row in own])[0] for value in VALUES]
        factor = own[0].get("gap_factor")
        lines.append(
            [
                measured_by,
                f"{own[0]['device_tokens']:,}",
                "-" if factor is None else f"{factor:.0f}",
                *(f"{median:,.3g}" if median < 1000 else f"{median:,.0f}" for median in medians),
            ]
        )
    return table(["pass", "pool", "gaps divided by", *VALUES.values()], lines)


def goals(rows: Sequence[Row]) -> str:
    """Time to first token falls with the uncached tokens, and does not rise where everything fits."""
    lines = []
    for measured_by, arm in _arms(rows):
        tokens, seconds = (
            paired_ratios(rows, WORKLOAD, arm, value, measured_by=measured_by)
            for value in ("uncached_tokens", "ttft_mean")
        )
        median, low, high = bootstrap(seconds)
        if measured_by == "fits":
            goal = f"TTFT's mean below {FITS_GOAL} where everything fits"
            lines.append([goal, arm, f"{median:.3f} ({low:.3f} to {high:.3f})", _met(high < FITS_GOAL)])
        elif measured_by == "closed" and bootstrap(tokens)[0] < 1:
            goal = f"TTFT's mean falls by {SHARE_GOAL} of the fall in uncached tokens"
            shares = [
                (1 - time) / (1 - count) for time, count in zip(seconds, tokens, strict=True) if count < 1
            ]
            share, low, high = bootstrap(shares)
            lines.append([goal, arm, f"{share:.2f} ({low:.2f} to {high:.2f})", _met(share >= SHARE_GOAL)])
    return table(["goal", "arm", "measured", "met"], lines)


def _met(met: bool) -> str:
    return "yes" if met else "**no**"


def agents_tables(rows: Sequence[Row]) -> list[str]:
    return [stock(rows), ratios(rows), goals(rows)]

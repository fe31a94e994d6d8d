"""Tables in docs/serving.md and the figure, made from the rows of the serving benchmark and nothing else."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmark.serving.arms import ARMS, STOCK
from benchmark.serving.figure import draw
from benchmark.serving.goals import goals
from benchmark.serving.measured import MISSING, Measured, Row, bootstrap, paired_ratios, table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "serving.md"
FIGURE = ROOT / "docs" / "img" / "serving.png"
TIMES = ("ttft_p50", "ttft_p95", "ttft_p99", "tpot_p50", "prompt_tokens_per_second", "cpu_seconds")


def uncached(measured: Measured) -> str:
    """Thousands, and the ratio to stock LRU."""

    def cell(workload: str, arm: str) -> str:
        tokens = measured.value(workload, arm, "uncached_tokens")
        stock = measured.value(workload, STOCK, "uncached_tokens")
        if tokens is None:
            return MISSING
        thousands = f"{tokens / 1e3:.1f}"
        return f"{thousands} ({tokens / stock:.2f})" if stock else thousands

    return table(
        ["arm", *measured.workloads],
        [[arm, *(cell(workload, arm) for workload in measured.workloads)] for arm in ARMS],
    )


def tiers(measured: Measured) -> str:
    """Where tokens were found and what was written, on workloads with tiers below the device."""
    lines = []
    for workload in measured.workloads:
        if measured.parameters["workloads"][workload].get("tiers", "device") == "device":
            continue
        for arm in ARMS:
            if (row := measured.counts.get((workload, arm))) is None:
                continue
            hits = [f"{row[f'{tier}_hit_tokens']:,}" for tier in ("device", "host", "storage")]
            stored = row.get("storage_bytes")
            lines.append(
                [
                    workload,
                    arm,
                    f"{row['hit_rate']:.3f}",
                    *hits,
                    f"{row['host_bytes_written'] / 1e6:.1f}",
                    f"{row['host_bytes_loaded'] / 1e6:.1f}",
                    MISSING if stored is None else f"{stored / 1e6:.1f}",
                ]
            )
    hits = [f"{tier} hits" for tier in ("device", "host", "storage")]
    return table(["workload", "arm", "hit rate", *hits, "to host MB", "from host MB", "stored MB"], lines)


def capacity(measured: Measured) -> str:
    sizes = sorted({row["device_tokens"] for row in measured.of("capacity")})
    lines = []
    for workload in dict.fromkeys(row["workload"] for row in measured.of("capacity")):
        curves = {
            arm: {
                row["device_tokens"]: row["hit_rate"]
                for row in measured.of("capacity", workload=workload, arm=arm)
            }
            for arm in ARMS
            if measured.of("capacity", workload=workload, arm=arm)
        }
        for arm, curve in curves.items():
            rates = [f"{curve[size]:.3f}" if size in curve else MISSING for size in sizes]
            default = measured.parameters["device_tokens"]
            needed = _capacity_for(curves.get(STOCK, {}), curve[default]) if default in curve else None
            lines.append([workload, arm, *rates, needed or MISSING])
    size = measured.parameters["device_tokens"]
    return table(["workload", "arm", *(f"{s:,}" for s in sizes), f"LRU needs for {size:,}"], lines)


def times(measured: Measured) -> str:
    lines = []
    for workload in dict.fromkeys(row["workload"] for row in measured.of("times")):
        for arm in ARMS:
            if arm == STOCK or not measured.of("times", workload=workload, arm=arm):
                continue
            cells = []
            for value in TIMES:
                ratios = paired_ratios(measured.rows, workload, arm, value)
                cells.append("{:.2f} ({:.2f} - {:.2f})".format(*bootstrap(ratios)) if ratios else MISSING)
            lines.append([workload, arm, str(len(measured.of("times", workload=workload, arm=arm))), *cells])
    titles = ["TTFT p50", "TTFT p95", "TTFT p99", "TPOT p50", "prompt tokens/s", "CPU time"]
    return table(["workload", "arm", "alternations", *titles], lines)


def restart(measured: Measured) -> str:
    lines = []
    for arm in ARMS:
        rows = measured.of("restart", arm=arm)
        if not rows:
            continue
        ratio = bootstrap([row["first_seconds"] / row["warm_seconds"] for row in rows])
        milliseconds = [
            f"{1e3 * statistics.median(row[f'{which}_seconds'] for row in rows):.1f}"
            for which in ("first", "warm")
        ]
        uncached = [
            f"{statistics.mean(row[f'{which}_uncached_tokens'] for row in rows):.0f}"
            for which in ("first", "warm")
        ]
        lines.append(
            [arm, str(len(rows)), *uncached, *milliseconds, "{:.2f} ({:.2f} - {:.2f})".format(*ratio)]
        )
    return table(
        ["arm", "documents", "uncached, first", "uncached, warm", "first ms", "warm ms", "first / warm"],
        lines,
    )


def replay(measured: Measured) -> str:
    rows = measured.of("replay")
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    found = {(row["workload"], row["factor"], row["policy"]): row["uncached_share"] for row in rows}
    lines = [
        [workload, f"x {factor}", *(f"{found[workload, factor, policy]:.3f}" for policy in policies)]
        for workload, factor in dict.fromkeys((row["workload"], row["factor"]) for row in rows)
    ]
    return table(["workload", "requests", *policies], lines)


def seeds(measured: Measured) -> str:
    shares: dict[tuple[str, int], dict[int, dict[str, Row]]] = {}
    for row in measured.of("seeds"):
        by_seed = shares.setdefault((row["workload"], row["factor"]), {})
        by_seed.setdefault(row["seed"], {})[row["policy"]] = row
    policies = list(dict.fromkeys(row["policy"] for row in measured.of("seeds")))
    lines = []
    for (workload, factor), by_seed in sorted(shares.items(), key=lambda item: item[0][1]):
        rows = list(by_seed.values())
        means = {
            policy: statistics.mean(known[policy]["uncached_share"] for known in rows)
            for policy in policies
            if policy in rows[0]
        }
        # The best of the means: the best of each seed would be a policy that nobody can choose.
        best = min((policy for policy in means if policy != "importance"), key=lambda name: means[name])
        tokens, seconds = "uncached_share", "seconds_share"
        ratios = [
            "{:.3f} ({:.3f} - {:.3f})".format(
                *bootstrap([known["importance"][value] / known[other][value] for known in rows])
            )
            for other, value in (("python-lru", tokens), (best, tokens), (best, seconds))
        ]
        cells = [f"{means[policy]:.3f}" if policy in means else MISSING for policy in policies]
        lines.append([f"{workload} x {factor}", str(len(rows)), *cells, ratios[0], best, *ratios[1:]])
    compared = ["ours / LRU", "best published", "ours / best", "ours / best, seconds"]
    return table(["workload", "seeds", *policies, *compared], lines)


def _capacity_for(curve: dict[int, float], rate: float) -> str | None:
    """Pool with which a curve of hit rate by pool size reaches ``rate``, between its points linearly."""
    points = sorted(curve.items())
    if not points:
        return None
    if rate <= points[0][1]:
        return f"<= {points[0][0]:,}"
    for (small, low), (large, high) in pairwise(points):
        if low < rate <= high:
            return f"{round(small + (large - small) * (rate - low) / (high - low)):,}"
    return f"> {points[-1][0]:,}"


def write_report(
    rows: list[Row], parameters: dict[str, Any], *, page: Path = PAGE, figure: Path | None = FIGURE
) -> None:
    """Puts each table between its markers in the page, and draws the figure.

    Raises:
        ValueError: the page has no place for a table.
    """
    measured = Measured(rows, parameters)
    text = page.read_text()
    tables: dict[str, Callable[[Measured], str]] = {
        "goals": goals,
        "uncached": uncached,
        "tiers": tiers,
        "capacity": capacity,
        "times": times,
        "restart": restart,
        "replay": replay,
        "seeds": seeds,
    }
    for name, make in tables.items():
        pattern = rf"(<!-- table {name} -->\n).*?(<!-- end {name} -->)"
        text, places = re.subn(
            pattern, lambda m, make=make: f"{m[1]}{make(measured)}\n{m[2]}", text, flags=re.DOTALL
        )
        if places != 1:
            raise ValueError(f"{page.name} has {places} places for the table {name}, not one")
    page.write_text(text)
    if figure is not None:
        draw(measured, figure)

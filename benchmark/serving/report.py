"""Tables for the pages of the serving benchmark, made from its rows and nothing else."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from benchmark.serving.arms import ARMS, BY_DEPTH, STOCK
from benchmark.serving.goals import goals
from benchmark.serving.measured import MISSING, Measured, bootstrap, paired_ratios, table
from benchmark.serving.rows import Row

TIMES = {
    "ttft_p50": "TTFT p50",
    "ttft_p95": "TTFT p95",
    "ttft_p99": "TTFT p99",
    "tpot_p50": "TPOT p50",
    "prompt_tokens_per_second": "prompt tokens/s",
    "cpu_seconds": "CPU time",
}


def uncached(measured: Measured) -> str:
    """Thousands, and the ratio to stock LRU; "= ours" where that arm decides the same and stands for it."""

    def cell(workload: str, arm: str) -> str:
        if (source := measured.source_of(workload, arm)) != arm:
            return f"= {source}"
        tokens = measured.value(workload, arm, "uncached_tokens")
        stock = measured.value(workload, STOCK, "uncached_tokens")
        if tokens is None:
            return MISSING
        thousands = f"{tokens / 1e3:.1f}"
        return f"{thousands} ({tokens / stock:.2f})" if stock else thousands

    lines = [[arm, *(cell(workload, arm) for workload in measured.workloads)] for arm in ARMS]
    return table(["arm", *measured.workloads], lines if measured.workloads else [])


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
    """Hit rate by size of the device pool; the committed size is that of the counts."""
    committed = measured.parameters["device_tokens"]
    sizes = sorted({row["device_tokens"] for row in measured.of("capacity")} | {committed})
    lines = []
    for workload in dict.fromkeys(row["workload"] for row in measured.of("capacity")):
        curves: dict[str, dict[int, float]] = {}
        for row in measured.of("capacity", workload=workload):
            curves.setdefault(row["arm"], {})[row["device_tokens"]] = row["hit_rate"]
        for arm in measured.parameters["capacity"]["arms"]:
            if (rate := measured.value(workload, arm, "hit_rate")) is not None:
                curves.setdefault(arm, {})[committed] = rate
        for arm, curve in curves.items():
            rates = [f"{curve[size]:.3f}" if size in curve else MISSING for size in sizes]
            needed = MISSING
            if committed in curve and STOCK in curves:
                needed = _capacity_for(curves[STOCK], curve[committed])
            lines.append([workload, arm, *rates, needed])
    return table(["workload", "arm", *(f"{size:,}" for size in sizes), f"LRU needs for {committed:,}"], lines)


def times(measured: Measured) -> str:
    return _ratios(measured, "times", list(TIMES))


def pairs(measured: Measured) -> str:
    return _ratios(measured, "pairs", [value for value in TIMES if value.startswith(("ttft", "tpot"))])


def _ratios(measured: Measured, measured_by: str, values: Sequence[str]) -> str:
    """To stock LRU, by workload and arm, of a pass that measured times."""
    lines = []
    for workload in dict.fromkeys(row["workload"] for row in measured.of(measured_by)):
        for arm in ARMS:
            alternations = len(measured.of(measured_by, workload=workload, arm=arm))
            if arm == STOCK or not alternations:
                continue
            cells = []
            for value in values:
                ratios = paired_ratios(measured.rows, workload, arm, value, measured_by=measured_by)
                cells.append("{:.2f} ({:.2f} - {:.2f})".format(*bootstrap(ratios)) if ratios else MISSING)
            lines.append([workload, arm, str(alternations), *cells])
    return table(["workload", "arm", "alternations", *(TIMES[value] for value in values)], lines)


def restart(measured: Measured) -> str:
    lines = []
    for arm in ARMS:
        rows = measured.of("restart", arm=arm)
        if not rows:
            continue
        ratios = measured.restart_ratios(arm)
        milliseconds = [
            f"{1e3 * statistics.median(row[f'{which}_seconds'] for row in rows):.1f}"
            for which in ("first", "warm")
        ]
        uncached = [
            f"{statistics.mean(row[f'{which}_uncached_tokens'] for row in rows):.0f}"
            for which in ("first", "warm")
        ]
        ratio = "{:.2f} ({:.2f} - {:.2f})".format(*bootstrap(ratios))
        lines.append([arm, str(len(ratios)), str(len(rows)), *uncached, *milliseconds, ratio])
    titles = ["uncached, first", "uncached, warm", "first ms", "warm ms", "first / warm"]
    return table(["arm", "restarts", "documents", *titles], lines)


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
        best = min((policy for policy in means if policy.startswith("python")), key=lambda name: means[name])
        tokens, seconds = "uncached_share", "seconds_share"
        ratios = [
            "{:.3f} ({:.3f} - {:.3f})".format(
                *bootstrap([known["importance"][value] / known[other][value] for known in rows])
            )
            for other, value in (
                ("python-lru", tokens),
                (best, tokens),
                (best, seconds),
                (BY_DEPTH, tokens),
                (BY_DEPTH, seconds),
            )
        ]
        cells = [f"{means[policy]:.3f}" if policy in means else MISSING for policy in policies]
        lines.append([f"{workload} x {factor}", str(len(rows)), *cells, ratios[0], best, *ratios[1:]])
    compared = ["ours / LRU", "best published"]
    compared += [f"ours / {other}{unit}" for other in ("best", "by depth") for unit in ("", ", seconds")]
    return table(["workload", "seeds", *policies, *compared], lines)


def commits(measured: Measured) -> str:
    """What was measured with which code; rows of two commits may compare two policies of one name."""
    rows_of = Counter((row["pass"], row.get("commit", "unknown")) for row in measured.rows)
    return table(["pass", "commit", "rows"], [[*which, str(rows)] for which, rows in sorted(rows_of.items())])


def _capacity_for(curve: dict[int, float], rate: float) -> str:
    """Pool with which a curve of hit rate by pool size reaches ``rate``, between its points linearly."""
    points = sorted(curve.items())
    if rate <= points[0][1]:
        return f"<= {points[0][0]:,}"
    for (small, low), (large, high) in pairwise(points):
        if low < rate <= high:
            return f"{round(small + (large - small) * (rate - low) / (high - low)):,}"
    return f"> {points[-1][0]:,}"


TABLES: dict[str, Callable[[Measured], str]] = {
    "goals": goals,
    "uncached": uncached,
    "tiers": tiers,
    "capacity": capacity,
    "times": times,
    "pairs": pairs,
    "restart": restart,
    "replay": replay,
    "seeds": seeds,
    "commits": commits,
}


def tables(rows: list[Row], parameters: dict[str, Any]) -> dict[str, str]:
    """Every table of the page by name, as Markdown; one of two lines has nothing to show yet."""
    measured = Measured(rows, parameters)
    return {name: make(measured) for name, make in TABLES.items()}

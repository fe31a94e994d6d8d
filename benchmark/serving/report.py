"""Tables in docs/serving.md and the figure, made from the rows of the serving benchmark and nothing else."""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmark.serving.arms import ARMS, OURS, PUBLISHED, STOCK

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "serving.md"
FIGURE = ROOT / "docs" / "img" / "serving.png"
RESAMPLES = 4000
MISSING = "-"
TIMES = ("ttft_p50", "ttft_p95", "ttft_p99", "tpot_p50", "prompt_tokens_per_second", "cpu_seconds")
TTFT_BOUND = 1.03
PRESSURE_BOUND = 0.7
STORAGE_BOUND = 0.5
RESTART_BOUND = 1.2

Row = dict[str, Any]


def bootstrap(values: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Median and its 95 % percentile interval."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return statistics.median(values), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


def paired_ratios(rows: Iterable[Row], workload: str, arm: str, value: str) -> list[float]:
    """``value`` of ``arm`` over that of stock LRU, for each alternation that has both."""
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        if row["pass"] == "times" and row["workload"] == workload and row["arm"] in (arm, STOCK):
            found.setdefault(row["alternation"], {})[row["arm"]] = row[value]
    return [pair[arm] / pair[STOCK] for _, pair in sorted(found.items()) if pair.get(arm) and pair.get(STOCK)]


class Report:
    """All tables, as Markdown."""

    def __init__(self, rows: list[Row], parameters: dict[str, Any]) -> None:
        self.rows = rows
        self.parameters = parameters
        self.workloads = [name for name in parameters["workloads"] if self._of("counts", workload=name)]
        measured = {row["arm"] for row in rows if row["pass"] == "counts"}
        self.arms = [name for name in ARMS if name in measured]
        self.counts = {(row["workload"], row["arm"]): row for row in self._of("counts")}

    def _of(self, name: str, **values: Any) -> list[Row]:
        return [
            row
            for row in self.rows
            if row["pass"] == name and all(row.get(key) == value for key, value in values.items())
        ]

    def _value(self, workload: str, arm: str, value: str) -> Any:
        return self.counts.get((workload, arm), {}).get(value)

    def best_published(self, workload: str) -> tuple[int, str] | None:
        """The fewest uncached tokens of a published policy, and whose they are."""
        known = [(self._value(workload, arm, "uncached_tokens"), arm) for arm in PUBLISHED]
        return min(((tokens, arm) for tokens, arm in known if tokens is not None), default=None)

    # ---- tables ----

    def uncached(self) -> str:
        """Thousands, and the ratio to stock LRU."""

        def cell(workload: str, arm: str) -> str:
            tokens = self._value(workload, arm, "uncached_tokens")
            stock = self._value(workload, STOCK, "uncached_tokens")
            if tokens is None:
                return MISSING
            thousands = f"{tokens / 1e3:.1f}"
            return f"{thousands} ({tokens / stock:.2f})" if stock else thousands

        return _table(
            ["arm", *self.workloads],
            [[arm, *(cell(workload, arm) for workload in self.workloads)] for arm in self.arms],
        )

    def tiers(self) -> str:
        """Where tokens were found and what was written, on workloads with tiers below the device."""
        lines = []
        for workload in self.workloads:
            if self.parameters["workloads"][workload].get("tiers", "device") == "device":
                continue
            for arm in self.arms:
                if (row := self.counts.get((workload, arm))) is None:
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
        return _table(
            ["workload", "arm", "hit rate", *hits, "to host MB", "from host MB", "stored MB"], lines
        )

    def capacity(self) -> str:
        sizes = sorted({row["device_tokens"] for row in self._of("capacity")})
        lines = []
        for workload in dict.fromkeys(row["workload"] for row in self._of("capacity")):
            curves = {
                arm: {
                    row["device_tokens"]: row["hit_rate"]
                    for row in self._of("capacity", workload=workload, arm=arm)
                }
                for arm in ARMS
                if self._of("capacity", workload=workload, arm=arm)
            }
            for arm, curve in curves.items():
                rates = [f"{curve[size]:.3f}" if size in curve else MISSING for size in sizes]
                default = self.parameters["device_tokens"]
                needed = _capacity_for(curves.get(STOCK, {}), curve[default]) if default in curve else None
                lines.append([workload, arm, *rates, needed or MISSING])
        size = self.parameters["device_tokens"]
        return _table(["workload", "arm", *(f"{s:,}" for s in sizes), f"LRU needs for {size:,}"], lines)

    def times(self) -> str:
        lines = []
        for workload in dict.fromkeys(row["workload"] for row in self._of("times")):
            for arm in ARMS:
                if arm == STOCK or not self._of("times", workload=workload, arm=arm):
                    continue
                cells = []
                for value in TIMES:
                    ratios = paired_ratios(self.rows, workload, arm, value)
                    cells.append("{:.2f} ({:.2f} - {:.2f})".format(*bootstrap(ratios)) if ratios else MISSING)
                lines.append([workload, arm, str(len(self._of("times", workload=workload, arm=arm))), *cells])
        titles = ["TTFT p50", "TTFT p95", "TTFT p99", "TPOT p50", "prompt tokens/s", "CPU time"]
        return _table(["workload", "arm", "alternations", *titles], lines)

    def restart(self) -> str:
        lines = []
        for arm in ARMS:
            rows = self._of("restart", arm=arm)
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
        return _table(
            ["arm", "documents", "uncached, first", "uncached, warm", "first ms", "warm ms", "first / warm"],
            lines,
        )

    def replay(self) -> str:
        rows = self._of("replay")
        policies = list(dict.fromkeys(row["policy"] for row in rows))
        found = {(row["workload"], row["factor"], row["policy"]): row["uncached_share"] for row in rows}
        lines = [
            [workload, f"x {factor}", *(f"{found[workload, factor, policy]:.3f}" for policy in policies)]
            for workload, factor in dict.fromkeys((row["workload"], row["factor"]) for row in rows)
        ]
        return _table(["workload", "requests", *policies], lines)

    def goals(self) -> str:
        lines = [
            *self._goal_best_published(),
            *self._goal_pressure(),
            *self._goal_fits(),
            *self._goal_storage(),
            *self._goal_restart(),
        ]
        return _table(["goal", "workload", "measured", "met"], lines)

    # ---- goals ----

    def _goal_best_published(self) -> Iterable[list[str]]:
        for workload in self.workloads:
            ours, best = self._value(workload, OURS, "uncached_tokens"), self.best_published(workload)
            if ours is not None and best is not None:
                tokens, arm = best
                shown = f"{ours:,} against {tokens:,} ({arm}): {ours / tokens:.3f}"
                yield [
                    "uncached tokens <= best of lru, slru, tlru, lfu",
                    workload,
                    shown,
                    _met(ours <= tokens),
                ]

    def _goal_pressure(self) -> Iterable[list[str]]:
        for workload in self.workloads:
            if self.parameters["workloads"][workload].get("working_set") != 4:
                continue
            ours, stock = (self._value(workload, arm, "uncached_tokens") for arm in (OURS, STOCK))
            if ours is not None and stock is not None:
                met = _met(ours / stock <= PRESSURE_BOUND)
                yield [
                    f"uncached tokens <= {PRESSURE_BOUND} of stock LRU at 4x",
                    workload,
                    f"{ours / stock:.3f}",
                    met,
                ]

    def _goal_fits(self) -> Iterable[list[str]]:
        ratios = paired_ratios(self.rows, "fits", OURS, "ttft_p50")
        if ratios:
            median, low, high = bootstrap(ratios)
            shown = f"{median:.3f} ({low:.3f} - {high:.3f})"
            yield [
                f"TTFT p50 ratio below {TTFT_BOUND} with its interval",
                "fits",
                shown,
                _met(high < TTFT_BOUND),
            ]

    def _goal_storage(self) -> Iterable[list[str]]:
        for workload in self.workloads:
            ours, stock = (self.counts.get((workload, arm)) for arm in (OURS, STOCK))
            if not (ours and stock and stock.get("storage_bytes")):
                continue
            ratio = ours["storage_bytes"] / stock["storage_bytes"]
            shown = f"{ratio:.2f} at hit rate {ours['hit_rate']:.3f} against {stock['hit_rate']:.3f}"
            met = _met(ratio <= STORAGE_BOUND and ours["hit_rate"] >= stock["hit_rate"])
            yield [f"storage bytes <= {STORAGE_BOUND} of stock at an equal hit rate", workload, shown, met]

    def _goal_restart(self) -> Iterable[list[str]]:
        rows = self._of("restart", arm=OURS)
        if rows:
            median, low, high = bootstrap([row["first_seconds"] / row["warm_seconds"] for row in rows])
            shown = f"{median:.2f} ({low:.2f} - {high:.2f})"
            goal = f"first request after a restart <= {RESTART_BOUND} of a warm one"
            yield [goal, "restart", shown, _met(median <= RESTART_BOUND)]

    # ---- figure ----

    def figure(self, path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        shown = [name for name in self.arms if name not in (STOCK, "no cache") and not ARMS[name].same_as]
        width = 0.8 / len(shown)
        figure, axes = pyplot.subplots(figsize=(11, 4))
        for place, arm in enumerate(shown):
            ratios = [
                (self._value(workload, arm, "uncached_tokens") or float("nan"))
                / self._value(workload, STOCK, "uncached_tokens")
                for workload in self.workloads
            ]
            positions = [index + width * (place - (len(shown) - 1) / 2) for index in range(len(ratios))]
            axes.bar(positions, ratios, width, label=arm)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xticks(range(len(self.workloads)), self.workloads, rotation=20, ha="right")
        axes.set_ylabel("uncached prefill tokens, to stock LRU")
        axes.set_title("One request at a time, every arm on every workload; below 1 is better than stock")
        axes.legend(ncols=4, fontsize=8)
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


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


def _met(met: bool) -> str:
    return "yes" if met else "**no**"


def _table(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [titles, ["---"] * len(titles), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write_report(
    rows: list[Row], parameters: dict[str, Any], *, page: Path = PAGE, figure: Path | None = FIGURE
) -> None:
    """Puts each table between its markers in the page, and draws the figure.

    Raises:
        ValueError: the page has no place for a table.
    """
    report = Report(rows, parameters)
    text = page.read_text()
    tables: dict[str, Callable[[], str]] = {
        "goals": report.goals,
        "uncached": report.uncached,
        "tiers": report.tiers,
        "capacity": report.capacity,
        "times": report.times,
        "restart": report.restart,
        "replay": report.replay,
    }
    for name, make in tables.items():
        pattern = rf"(<!-- table {name} -->\n).*?(<!-- end {name} -->)"
        text, places = re.subn(pattern, lambda m, make=make: f"{m[1]}{make()}\n{m[2]}", text, flags=re.DOTALL)
        if places != 1:
            raise ValueError(f"{page.name} has {places} places for the table {name}, not one")
    page.write_text(text)
    if figure is not None and len(report.arms) > 1:
        report.figure(figure)

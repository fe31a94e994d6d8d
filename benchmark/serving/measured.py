"""What the passes have measured, by workload and arm, with the statistics of the report."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmark.serving.arms import ARMS, PUBLISHED, STOCK
from benchmark.serving.rows import Row
from sgl_importance_lab.study.statistics import median_of

MISSING = "-"


def bootstrap(values: Sequence[float]) -> tuple[float, float, float]:
    """Median and the ends of its 95 % interval."""
    estimate = median_of(values)
    return estimate.value, estimate.low, estimate.high


def paired_ratios(
    rows: Iterable[Row], workload: str, arm: str, value: str, *, measured_by: str = "times"
) -> list[float]:
    """``value`` of ``arm`` over that of stock LRU, for each alternation of a pass that has both."""
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        if row["pass"] == measured_by and row["workload"] == workload and row["arm"] in (arm, STOCK):
            found.setdefault(row["alternation"], {})[row["arm"]] = row[value]
    return [pair[arm] / pair[STOCK] for _, pair in sorted(found.items()) if pair.get(arm) and pair.get(STOCK)]


class Measured:
    """The rows of all passes."""

    def __init__(self, rows: list[Row], parameters: dict[str, Any]) -> None:
        self.rows = rows
        self.parameters = parameters
        self.workloads = [name for name in parameters["workloads"] if self.of("counts", workload=name)]
        self.counts = {(row["workload"], row["arm"]): row for row in self.of("counts")}

    def of(self, name: str, **values: Any) -> list[Row]:
        """Rows of a pass that have the given values."""
        return [
            row
            for row in self.rows
            if row["pass"] == name and all(row.get(key) == value for key, value in values.items())
        ]

    def source_of(self, workload: str, arm: str) -> str:
        """The arm itself; where it was not counted and its decisions are another's, that other arm."""
        tiers = self.parameters["workloads"][workload].get("tiers", "device")
        if (workload, arm) not in self.counts and ARMS[arm].is_copy(tiers):
            return ARMS[arm].same_as or arm
        return arm

    def value(self, workload: str, arm: str, value: str) -> Any:
        """Of the counted pass; None where it was not measured."""
        return self.counts.get((workload, self.source_of(workload, arm)), {}).get(value)

    def restart_ratios(self, arm: str) -> list[float]:
        """Time of a first request over that of a warm one: of each restart the median of its documents."""
        ratios: dict[int, list[float]] = {}
        for row in self.of("restart", arm=arm):
            ratios.setdefault(row["alternation"], []).append(row["first_seconds"] / row["warm_seconds"])
        return [statistics.median(found) for found in ratios.values()]

    def best_published(self, workload: str) -> tuple[int, str] | None:
        """The fewest uncached tokens of a published policy, and whose they are."""
        known = [(self.value(workload, arm, "uncached_tokens"), arm) for arm in PUBLISHED]
        return min(((tokens, arm) for tokens, arm in known if tokens is not None), default=None)


def table(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """As Markdown."""
    rows = [titles, ["---"] * len(titles), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)

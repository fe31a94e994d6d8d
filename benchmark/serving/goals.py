"""The goals of the benchmark and whether they were met."""

from __future__ import annotations

from collections.abc import Iterable

from benchmark.serving.arms import OURS, STOCK
from benchmark.serving.measured import MISSING, Measured, bootstrap, paired_ratios, table

TTFT_BOUND = 1.03
PRESSURE_BOUND = 0.7
STORAGE_BOUND = 0.5
RESTART_BOUND = 1.2
GATED = ("ours (gate on)", "ours (gate on at 0.2)")  # measured when there was a write gate
PENDING = "not measured yet"  # both are about times, which want a quiet machine


def goals(measured: Measured) -> str:
    """One line per goal and workload."""
    lines = [
        *_goal_best_published(measured),
        *_goal_pressure(measured),
        *_goal_fits(measured),
        *_goal_storage(measured),
        *_goal_restart(measured),
    ]
    return table(["goal", "workload", "measured", "met"], lines)


def _goal_best_published(measured: Measured) -> Iterable[list[str]]:
    for workload in measured.workloads:
        ours, best = measured.value(workload, OURS, "uncached_tokens"), measured.best_published(workload)
        if ours is not None and best is not None:
            tokens, arm = best
            shown = f"{ours:,} against {tokens:,} ({arm}): {ours / tokens:.3f}"
            yield [
                "uncached tokens <= best of lru, slru, tlru, lfu",
                workload,
                shown,
                _met(ours <= tokens),
            ]


def _goal_pressure(measured: Measured) -> Iterable[list[str]]:
    for workload in measured.workloads:
        if measured.parameters["workloads"][workload].get("working_set") != 4:
            continue
        ours, stock = (measured.value(workload, arm, "uncached_tokens") for arm in (OURS, STOCK))
        if ours is not None and stock is not None:
            met = _met(ours / stock <= PRESSURE_BOUND)
            yield [
                f"uncached tokens <= {PRESSURE_BOUND} of stock LRU at 4x",
                workload,
                f"{ours / stock:.3f}",
                met,
            ]


def _goal_fits(measured: Measured) -> Iterable[list[str]]:
    goal = f"TTFT p50 ratio below {TTFT_BOUND} with its interval"
    for measured_by, how in (("times", "fits, open loop"), ("pairs", "fits, side by side")):
        if ratios := paired_ratios(measured.rows, "fits", OURS, "ttft_p50", measured_by=measured_by):
            median, low, high = bootstrap(ratios)
            yield [goal, how, f"{median:.4f} ({low:.4f} - {high:.4f})", _met(high < TTFT_BOUND)]
        else:
            yield [goal, how, PENDING, MISSING]


def _goal_storage(measured: Measured) -> Iterable[list[str]]:
    for workload in measured.workloads:
        stock = measured.counts.get((workload, STOCK))
        if not (stock and stock.get("storage_bytes")):
            continue
        for arm in (OURS, *GATED):
            if ours := measured.counts.get((workload, arm)):
                ratio = ours["storage_bytes"] / stock["storage_bytes"]
                hits = f"hit rate {ours['hit_rate']:.3f} against {stock['hit_rate']:.3f}"
                met = _met(ratio <= STORAGE_BOUND and ours["hit_rate"] >= stock["hit_rate"])
                goal = f"storage bytes <= {STORAGE_BOUND} of stock at an equal hit rate"
                yield [goal, f"{workload}, {arm}", f"{ratio:.2f} at {hits}", met]


def _goal_restart(measured: Measured) -> Iterable[list[str]]:
    goal = f"first request after a restart <= {RESTART_BOUND} of a warm one"
    if ratios := measured.restart_ratios(OURS):
        median, low, high = bootstrap(ratios)
        yield [goal, "restart", f"{median:.2f} ({low:.2f} - {high:.2f})", _met(median <= RESTART_BOUND)]
    else:
        yield [goal, "restart", PENDING, MISSING]


def _met(met: bool) -> str:
    return "yes" if met else "**no**"

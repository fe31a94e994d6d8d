"""Standard benchmarks of one server with several budgets, made of ``benchmark/results/bench_ruler.json``."""

from __future__ import annotations

import msgspec

from benchmark.serving.measured import table as _table
from scripts.rendering.figures import results
from sgl_importance_lab.bench.bench_run import Run
from sgl_importance_lab.bench.paired import NO_VERDICT, Paired, paired
from sgl_importance_lab.study.statistics import Estimate


def _pairs() -> list[tuple[Run, Paired]]:
    """Each run beside the exact one that was asked the same, itself among them."""
    runs = msgspec.convert(results("bench_ruler")["runs"], list[Run])
    ceilings = [run for run in runs if run.selector == "all"]
    return [
        (run, pair)
        for ceiling in ceilings
        for run in runs
        if run.asked == ceiling.asked
        for pair in paired(ceiling, run)
    ]


def _interval(estimate: Estimate) -> str:
    return f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"


def ruler_table() -> str:
    lines = []
    for run, pair in _pairs():
        exact = run.selector == "all"
        compared = [_interval(pair.difference), f"{pair.lost}, {pair.won}", f"{pair.equal:.2f}"]
        lines.append(
            [
                pair.task,
                f"{pair.length:,}",
                str(pair.n),
                "exact" if exact else f"`{run.selector}`, {run.budget:.0%}",
                _interval(pair.second),
                *(["-"] * 3 if exact else compared),
                "-" if exact else "no verdict" if pair.verdict == NO_VERDICT else pair.verdict,
            ]
        )
    titles = ["task", "tokens", "n", "pages", "score", "less exact", "lost, won", "same answer", "verdict"]
    return _table(titles, lines)


def ruler_n() -> int:
    """Prompts of the first task."""
    return _pairs()[0][1].n


def ruler_loss_bound() -> str:
    """What no loss in ``ruler_n`` leaves possible: the upper end of a two-sided exact 95 % interval.

    Clopper and Pearson (1934).
    """
    return f"{1 - 0.025 ** (1 / ruler_n()):.0%}"

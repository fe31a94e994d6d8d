"""Quality against budget, one panel a task. Needs matplotlib (extra ``replay``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sgl_importance_lab.bench.bench_run import Run
from sgl_importance_lab.bench.paired import scores_of
from sgl_importance_lab.study.statistics import mean_of


def budget_share(run: Run, length: int) -> float:
    """Share of its context that a step reads; 1 where nothing chooses."""
    if run.budget is None:
        return 1.0
    return run.budget if run.budget < 1 else min(1.0, run.budget / length)


def draw_quality(runs: Sequence[Run], path: Path) -> None:
    """Draws scores with their intervals; a line joins the budgets of one selector at one length.

    Args:
        path: file to write; its suffix says which type.
    """
    from matplotlib.figure import Figure  # not pyplot, which would look for a display

    points: dict[str, dict[str, list[tuple[float, float, float, float]]]] = {}
    for run in runs:
        for task, length, scores in scores_of(run):
            estimate = mean_of(scores)
            line = f"{run.selector or 'dense'}, {length}" if length else run.selector or "dense"
            point = (
                100 * budget_share(run, length or 1),
                estimate.value,
                estimate.value - estimate.low,
                estimate.high - estimate.value,
            )
            points.setdefault(task, {}).setdefault(line, []).append(point)
    figure = Figure(figsize=(4.8 * len(points), 4.2), layout="constrained")
    panels = figure.subplots(1, len(points), squeeze=False, sharey=True)[0]
    for panel, (task, lines) in zip(panels, points.items(), strict=True):
        for line, found in lines.items():
            shares, values, below, above = zip(*sorted(found), strict=True)
            panel.errorbar(shares, values, yerr=(below, above), marker="o", capsize=3, label=line)
        panel.set(title=task, xlabel="budget, % of the context", ylim=(-0.05, 1.05))
        panel.legend(fontsize="small")
    panels[0].set_ylabel("score, with its 95 % interval")
    figure.savefig(path)

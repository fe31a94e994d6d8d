"""Hit rate versus budget, with the optimum as the ceiling. Needs matplotlib (extra ``replay``)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from sgl_importance.errors import ImportanceError
from sgl_importance_lab.replay.policy_registry import OPTIMUM
from sgl_importance_lab.replay.replay_runner import Row

FILE_TYPES = (".png", ".svg", ".pdf")


class PlotError(ImportanceError, ValueError):
    """The picture could not be drawn; the message names the cure."""


def check_plot(path: Path) -> None:
    """Finds out before the work starts whether the picture could be drawn.

    Raises:
        PlotError: matplotlib is missing, or does not know such files.
    """
    if find_spec("matplotlib") is None:
        raise PlotError("--plot needs matplotlib: pip install './benchmark/lab[replay]'")
    if path.suffix.lower() not in FILE_TYPES:
        raise PlotError(f"--plot cannot write {path.name!r}: end the name in {', '.join(FILE_TYPES)}")


def plot_rows(rows: Sequence[Row], unique_blocks: dict[str, int], path: Path) -> None:
    """Draws one panel per trace.

    Args:
        rows: results; those of the optimum become the ceiling.
        unique_blocks: by trace; 100 % of the budget.
        path: file to write; its suffix says which type.
    """
    from matplotlib.figure import Figure  # not pyplot, which would look for a display

    traces = list(dict.fromkeys(row.trace for row in rows))
    figure = Figure(figsize=(7.2 * len(traces), 4.8), layout="constrained")
    panels = figure.subplots(1, len(traces), squeeze=False)[0]
    for panel, trace in zip(panels, traces, strict=True):
        for policy in dict.fromkeys(row.policy for row in rows):
            points = sorted(
                (100 * row.capacity_blocks / unique_blocks[trace], row.block_hit_rate)
                for row in rows
                if (row.trace, row.policy) == (trace, policy)
            )
            if not points:
                continue
            budgets, rates = zip(*points, strict=True)
            if policy == OPTIMUM:
                panel.plot(budgets, rates, "k--", marker=".", label="optimum (belady)")
                panel.fill_between(budgets, rates, 1, color="0.92", label="out of reach")
            else:
                panel.plot(budgets, rates, marker="o", markersize=4, label=policy)
        highest = max(row.block_hit_rate for row in rows if row.trace == trace)
        panel.set(
            title=trace,
            xlabel="capacity, % of unique blocks",
            ylabel="block hit rate",
            xscale="log",
            ylim=(0, min(1.0, 1.15 * highest) or 1.0),
        )
        panel.xaxis.set_major_formatter("{x:g}")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=150)

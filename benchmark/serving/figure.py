"""The figure of the serving benchmark."""

from __future__ import annotations

from pathlib import Path

from benchmark.serving.arms import ARMS, STOCK
from benchmark.serving.measured import Measured


def draw(measured: Measured, path: Path) -> None:
    """Uncached tokens of every arm on every workload, relative to stock LRU."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counted = {arm for _, arm in measured.counts} - {STOCK, "no cache"}
    shown = [name for name in ARMS if name in counted and ARMS[name].same_as is None]
    if not shown:
        return
    width = 0.8 / len(shown)
    figure, axes = pyplot.subplots(figsize=(11, 4))
    for place, arm in enumerate(shown):
        tokens = [
            [measured.value(workload, name, "uncached_tokens") or float("nan") for name in (arm, STOCK)]
            for workload in measured.workloads
        ]
        ratios = [of_arm / of_stock for of_arm, of_stock in tokens]
        positions = [index + width * (place - (len(shown) - 1) / 2) for index in range(len(ratios))]
        axes.bar(positions, ratios, width, label=arm)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(measured.workloads)), measured.workloads, rotation=20, ha="right")
    axes.set_ylabel("uncached prefill tokens, to stock LRU")
    axes.set_title("One request at a time, through a real server; below 1 is better than stock")
    figure.legend(ncols=len(shown), fontsize=8, loc="lower center", frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))  # room for the legend, which would hide bars
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)

"""Draws what chosen pages are worth, for the README.

    python benchmark/sparse/figure.py

Its numbers are the results of ``served.py`` and ``exact_match.py``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import matplotlib as mpl
import typer
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]
# ruff: noqa: E402
from benchmark.results import RESULTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURE = ROOT / "docs" / "img" / "pages.svg"
GREY, PALE, BLUE = "#8c959f", "#b9c7ee", "#3557c8"
COLORS = {"stock": GREY, "tiered all": PALE, "tiered rep": BLUE}
NAMES = {
    "stock": "stock, everything on the device",
    "tiered all": "7,000 tokens there, reads all",
    "tiered rep": "7,000 tokens there, reads 5 %",
}
SELECTORS = ("window", "mean", "quest", "infllm", "rep", "token")
CONTEXT = 8192


def rows(name: str) -> list[dict[str, Any]]:
    """Of one benchmark's results."""
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return found


def paint_tokens(axis: Axes) -> None:
    """Milliseconds of a further token, by context and server."""
    decode = [row for row in rows("pages_served") if row["what"] == "decode"]
    contexts = sorted({row["context"] for row in decode})
    for at, (arm, color) in enumerate(COLORS.items()):
        of_arm = [row["ms"] for row in decode if row["arm"] == arm]
        places = [place + 0.27 * (at - 1) for place in range(len(contexts))]
        bars = axis.bar(places, of_arm, 0.25, color=color, label=NAMES[arm])
        axis.bar_label(bars, [f"{ms:.0f}" for ms in of_arm], fontsize=8)
    axis.set_xticks(range(len(contexts)), [f"{context:,} tokens" for context in contexts])
    axis.set_title("Milliseconds for a further token", fontsize=10)
    axis.margins(y=0.1)
    axis.legend(fontsize=8, frameon=False)


def paint_answers(axis: Axes) -> None:
    """Share of right answers, by selector."""
    of_selector = {
        row["selector"]: row["sparse"]
        for row in rows("pages_exact_match")
        if row["length"] == CONTEXT and row["task"] == "multi-key"
    }
    right = [of_selector[name] for name in SELECTORS]
    bars = axis.barh(SELECTORS, right, color=[BLUE if name == "rep" else GREY for name in SELECTORS])
    axis.bar_label(bars, [f"{share:.3f}" for share in right], fontsize=8, padding=2)
    axis.set_xlim(0, 1.15)
    axis.set_title(f"Right answers, 5 % of {CONTEXT:,} tokens read", fontsize=10)


def draw(path: Path) -> None:
    """Writes the figure as SVG with its texts as texts; the same results give the same file."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pages", "font.family": "sans-serif"}):
        figure = Figure(figsize=(9.6, 3.2), layout="constrained")
        for paint, axis in zip((paint_tokens, paint_answers), figure.subplots(1, 2), strict=True):
            paint(axis)
            axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def main(out: Annotated[Path, typer.Option(help="Write the SVG there.")] = FIGURE) -> None:
    draw(out)
    print(out)


if __name__ == "__main__":
    typer.run(main)

"""The findings of a study: printed, and kept as JSON beside its figure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.table import Table

from sgl_importance.errors import ImportanceError
from sgl_importance.observe.trace.records import Header
from sgl_importance.terminal import add_texts, plain
from sgl_importance_lab.study.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OF_THESE_MODELS = "says what the recorded models do; another model needs recordings of its own"

WIDEST = 1000  # columns of a terminal
MOST_ROWS = 60  # at a terminal
FEWEST_UNITS = 5
"""Resampled units that a verdict needs: an interval that is drawn from fewer is too narrow."""


class StudyError(ImportanceError):
    """The recordings cannot answer the question; the message says why and what to record."""


class Studied(Protocol):
    """What a finding says of a recording that it rests on."""

    @property
    def name(self) -> str: ...

    @property
    def header(self) -> Header: ...

    @property
    def num_requests(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer. From fewer than ``FEWEST_UNITS`` units it has no verdict, whatever it is given.

    Attributes:
        study: name of the question.
        claim: the statement that is tested.
        value: the number that decides, with its interval.
        verdict: conclusion from the interval.
        notes: remarks without which the value would be misread.
        rows: the numbers behind it, all with the same keys.
        p_value: one-sided, for the claim's being false; of a claim of several parts, the largest of theirs.
            None where the interval says all.
    """

    study: str
    claim: str
    value: Estimate
    verdict: str
    notes: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]
    p_value: float | None = None

    def __post_init__(self) -> None:
        if said := no_verdict(self.value):
            object.__setattr__(self, "verdict", said)

    def show(self, console: Console) -> None:
        table = Table(title=plain(f"{self.study}: {self.claim}", "table.title"))
        for column, value in self.rows[0].items():
            table.add_column(plain(column), justify="left" if isinstance(value, str) else "right")
        for row in self.rows[:MOST_ROWS]:
            add_texts(table, *map(_shown, row.values()))
        # A line that wraps can be read, a column of dots cannot.
        needed = console.measure(table, options=console.options.update(max_width=WIDEST)).maximum
        Console(file=console.file, width=max(needed, console.width)).print(table)
        if len(self.rows) > MOST_ROWS:
            console.print(f"{len(self.rows) - MOST_ROWS} more rows are in {self.study}.json")
        console.print(f"value: {self.value}, n = {self.value.n}")
        console.print(plain(f"verdict: {self.verdict}"))
        if self.p_value is not None:
            console.print(f"p: {self.p_value:.4f}")
        for note in self.notes:
            console.print(plain(f"note: {note}"))

    def write(self, folder: Path, recordings: Sequence[Studied], command: str) -> Path:
        """Writes ``<study>.json`` into the folder."""
        path = folder / f"{self.study}.json"
        document = {
            **asdict(self),
            "command": command,
            "recordings": [
                {
                    "name": recording.name,
                    "model": recording.header.model,
                    "page_size": recording.header.page_size,
                    "layers": list(recording.header.layers),
                    "options": {k: v for k, v in recording.header.options.items() if k != "trace"},
                    "requests": recording.num_requests,
                }
                for recording in recordings
            ],
        }
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return path


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def no_verdict(value: Estimate) -> str | None:
    """What is said in place of a verdict where too few units decide; None where they are enough."""
    if value.n >= FEWEST_UNITS:
        return None
    return f"none: n = {value.n}, and fewer than {FEWEST_UNITS} decide nothing"


def verdict_of(value: Estimate, *, positive: str, negative: str, undecided: str) -> str:
    """The one of three sentences that the interval of a difference supports."""
    if value.low > 0:
        return positive
    return negative if value.high < 0 else undecided


def verdict_of_parts(*parts: tuple[bool, bool, str]) -> str:
    """The verdict on a claim of several parts: each (is shown, is refuted, what was found)."""
    said = "; ".join(text for _, _, text in parts)
    if all(shown for shown, _, _ in parts):
        return f"supported: {said}"
    if any(refuted for _, refuted, _ in parts):
        return f"not supported: {said}"
    return f"undecided: {said}"


def check_drawing() -> None:
    """
    Raises:
        StudyError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise StudyError(
            "figures need matplotlib: pip install './benchmark/lab[replay]', or give --no-figure"
        )


def draw(path: Path, panels: Sequence[tuple[str, Callable[[Axes], None]]]) -> None:
    """Draws panels side by side into a PNG file.

    Raises:
        StudyError: matplotlib is not installed.
    """
    check_drawing()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(panels), 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for (title, paint), axis in zip(panels, axes, strict=True):
        axis.set_title(title, fontsize=10)
        paint(axis)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120, metadata={"Software": None})

"""The series of pre-warms, published by the HTTP process, which carries them out."""

from __future__ import annotations

from sgl_importance.metrics_table import Process, of_process
from sglang_importance.metrics.exposition import Exposition, metrics_are_shared

_exposition: Exposition | None = None


def export() -> None:
    """Makes the series, at zero, where the server exports metrics."""
    global _exposition
    if metrics_are_shared() and _exposition is None:
        _exposition = Exposition(of_process(Process.HTTP))


def count(name: str, *labels: str, amount: int = 1) -> None:
    """Adds to a series, where they are exported."""
    if _exposition is not None:
        _exposition.increase(name, labels, amount)

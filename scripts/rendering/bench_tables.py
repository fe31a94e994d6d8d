"""What RULER says of chosen pages, made of the runs in ``benchmark/results/bench``."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from benchmark.serving.measured import table
from sgl_importance_lab.bench.bench_run import Run, read_run
from sgl_importance_lab.bench.paired import Paired, paired

_RUNS = Path(__file__).resolve().parents[2] / "benchmark" / "results" / "bench"
_CEILING = "all"


@cache
def _runs() -> dict[str, list[Run]]:
    """By task, the ceiling first and then by falling budget."""
    found: dict[str, list[Run]] = {}
    for file in sorted(_RUNS.glob("ruler-*.json")):
        run = read_run(file)
        found.setdefault(run.asked.tasks[0], []).append(run)
    return {
        task: sorted(runs, key=lambda run: -(run.budget or float("inf")))
        for task, runs in sorted(found.items())
    }


def _pairs(task: str) -> list[tuple[Run, Paired]]:
    ceiling, *others = _runs()[task]
    assert ceiling.selector == _CEILING, ceiling.name
    return [(run, each) for run in (ceiling, *others) for each in paired(ceiling, run)]


def bench_pairs() -> str:
    """Every arm beside the ceiling of its task, on the same prompts."""
    lines = []
    for task in _runs():
        for run, pair in _pairs(task):
            score = f"{pair.second.value:.2f} ({pair.second.low:.2f} to {pair.second.high:.2f})"
            if run.selector == _CEILING:
                lines.append([task, str(pair.length), "every page", str(pair.n), score, *["-"] * 4])
                continue
            less = pair.difference
            lines.append(
                [
                    *(task, str(pair.length), f"`{run.selector}`, {run.budget:g} tokens", str(pair.n), score),
                    f"{less.value:+.2f} ({less.low:+.2f} to {less.high:+.2f})",
                    f"{pair.lost}, {pair.won} (p {pair.p:.3f})",
                    f"{pair.equal:.2f}",
                    pair.verdict,
                ]
            )
    titles = [
        "task",
        "length",
        "read",
        "n",
        "score",
        "less every page",
        "lost, won",
        "same answer",
        "verdict",
    ]
    return table(titles, lines)


def bench_right(task: str, budget: int | None = None) -> str:
    """Prompts answered wholly right, of all; None is every page."""
    for run, pair in _pairs(task):
        if run.budget == budget:
            right = sum(sample.score == 1 for part in run.parts for sample in part.samples)
            return f"{right} of {pair.n}"
    raise ValueError(f"no run of {task} with a budget of {budget}")

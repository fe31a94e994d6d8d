"""H1, read as sparse serving: do earlier queries' scores say which pages the next decode step needs?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from sgl_importance_lab.study.recording import Recording
from sgl_importance_lab.study.residency import POLICIES, Hits, replay
from sgl_importance_lab.study.statistics import Estimate, bootstrap, ratio_of
from sgl_importance_lab.study.streams import MIN_QUERIES, Stream, streams
from sgl_importance_lab.study.study_report import OF_THESE_MODELS, Finding, StudyError, draw, verdict_of

SHARES = (0.05, 0.1, 0.2)
BUDGETS = (0.1, 0.2, 0.3, 0.5)
SCORED = ("ema", "window", "combined")
# Where the verdict is read: chosen before the first run, the middle of the grid.
DECISIVE_SHARE, DECISIVE_BUDGET = 0.1, 0.2
CLAIM = "sparse-serving reading: scores of earlier steps keep more of the next step's pages than LRU does"

Cell = tuple[str, str, float, float]  # reading, context band, share, budget


def context_band(tokens: int) -> str:
    """Doublings of the context length, as text."""
    band = 1 << max(0, tokens - 1).bit_length()
    return f"{band // 2 + 1}-{band}"


def difference(units: Sequence[tuple[Hits, Hits]]) -> Estimate:
    """Hit rate of the first minus that of the second, with its interval over streams."""
    rows = [(a.hits - b.hits, a.requests) for a, b in units]
    return bootstrap(rows, lambda table: float(table[:, 0].sum() / table[:, 1].sum()))


def run_grid(found: Sequence[Stream]) -> dict[Cell, dict[str, list[Hits]]]:
    """Hits of every policy on every stream, by cell."""
    cells: dict[Cell, dict[str, list[Hits]]] = defaultdict(lambda: defaultdict(list))
    console = Console(stderr=True)
    for stream in track(found, "replaying steps", console=console, transient=True):
        for share in SHARES:
            for budget in BUDGETS:
                pages = max(1, round(budget * len(stream.steps[0].pages)))
                cell = (
                    f"{stream.kind}: {stream.reading}",
                    context_band(stream.context_tokens),
                    share,
                    budget,
                )
                for policy in POLICIES:
                    cells[cell][policy].append(replay(stream, policy, share=share, budget_pages=pages))
    return cells


def _place(item: tuple[Cell, object]) -> tuple[object, ...]:
    (workload, band, *rest), _ = item
    return workload, int(band.partition("-")[0]), *rest


def study_h1(
    recordings: Sequence[Recording], *, figure: Path | None = None, min_queries: int = MIN_QUERIES
) -> Finding:
    """
    Args:
        recordings: with steps.
        figure: file to draw into.
        min_queries: that a context needs whose short answers are one stream together.

    Raises:
        StudyError: there are no decode steps enough.
    """
    found = [stream for recording in recordings for stream in streams(recording, min_queries)]
    if not found:
        raise StudyError(
            "no stream of decode steps in the recordings: record with trace.detail = 'steps' "
            "and signal.interval = 1 of --kv-importance-config"
        )
    cells = run_grid(found)
    rows: list[dict[str, Any]] = []
    for (workload, band, share, budget), policies in sorted(cells.items(), key=_place):
        gain = difference(list(zip(policies["ema"], policies["lru"], strict=True)))
        low, high = gain.ends
        rows.append(
            {
                "workload": workload,
                "context": band,
                "top": share,
                "budget": budget,
                "streams": len(policies["lru"]),
                **{
                    policy: ratio_of([(h.hits, h.requests) for h in hits]).value
                    for policy, hits in policies.items()
                },
                "ema-lru": gain.value,
                "low": low,
                "high": high,
            }
        )
    decisive: dict[str, list[tuple[Hits, Hits]]] = defaultdict(list)
    for (workload, _, share, budget), policies in cells.items():
        if (share, budget) == (DECISIVE_SHARE, DECISIVE_BUDGET):
            decisive[workload] += zip(policies["ema"], policies["lru"], strict=True)
    value = difference([pair for pairs in decisive.values() for pair in pairs])
    if figure is not None:
        readings = sorted({cell[0] for cell in cells})
        draw(
            figure,
            [(f"{reading}, top {DECISIVE_SHARE:.0%}", _painter(cells, reading)) for reading in readings],
        )
    return Finding(
        study="h1",
        claim=CLAIM,
        value=value,
        verdict=verdict_of(
            value,
            positive="supported: EMA of mass beats LRU",
            negative="refuted: LRU beats EMA of mass",
            undecided="undecided: the interval of EMA minus LRU holds 0",
        ),
        notes=(
            f"value: hit rate of EMA minus LRU over all streams, top {DECISIVE_SHARE:.0%}, budget "
            f"{DECISIVE_BUDGET:.0%} of the context's pages; streams are the resampled units",
            *(f"{workload}: {difference(pairs)}" for workload, pairs in sorted(decisive.items())),
            "each step asks for its top pages by attention mass, sinks and neighbourhood included; all "
            "policies load on demand and may bypass; optimum knows the future",
            "sparse serving: it says what a system that fetches pages per step would hit, not what a prefix "
            "cache would",
            OF_THESE_MODELS,
        ),
        rows=tuple(rows),
    )


def _painter(cells: dict[Cell, dict[str, list[Hits]]], reading: str) -> Any:
    def paint(axis: Any) -> None:
        for policy in POLICIES:
            rates = []
            for budget in BUDGETS:
                hits = [
                    hit
                    for cell, policies in cells.items()
                    if cell[0] == reading and cell[2:] == (DECISIVE_SHARE, budget)
                    for hit in policies[policy]
                ]
                rates.append(sum(h.hits for h in hits) / max(1, sum(h.requests for h in hits)))
            style = "k--" if policy == "optimum" else ("o-" if policy in SCORED else "x:")
            axis.plot(BUDGETS, rates, style, label=policy)
        axis.set_xlabel("budget, share of the context's pages")
        axis.set_ylabel("hit rate of requested pages")
        axis.set_ylim(0, 1)
        axis.legend(fontsize=7)

    return paint

"""H2: do the pages that matter to one query matter to the next?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sgl_importance_lab.study.documents import SharedContext, shared_contexts
from sgl_importance_lab.study.recording import Recording
from sgl_importance_lab.study.statistics import Floats, chance_jaccard, jaccard, mean_of, top_pages
from sgl_importance_lab.study.study_report import OF_THESE_MODELS, Finding, StudyError, draw

SHARE = 0.1
MIN_QUERIES = 50
MIN_PAGES = 10
AGREEMENT = 0.5
CLAIM = "the top 10 % pages of all other queries on a context are the top 10 % of a single one (Jaccard)"


def context_scores(context: SharedContext) -> Floats:
    """Body mass of each query on each page of the context; float64 [queries, pages]. Queries that no fold
    was recorded of are left out."""
    pages = len(context.pages)
    rows = [query.body()[:pages] for query in context.queries if query.folds]
    return np.array([row for row in rows if len(row) == pages]).reshape(-1, pages)


def agreements(scores: Floats, share: float = SHARE) -> list[float]:
    """Jaccard index of each query's top pages with those of the mean of all other queries."""
    total = scores.sum(axis=0)
    return [jaccard(top_pages(row, share), top_pages(total - row, share)) for row in scores]


def study_h2(
    recordings: Sequence[Recording], *, figure: Path | None = None, min_queries: int = MIN_QUERIES
) -> Finding:
    """The value is that of the recordings with the settings of the first; others get rows of their own.

    Raises:
        StudyError: no context has queries enough.
    """
    by_workload: dict[str, list[float]] = defaultdict(list)
    chance: dict[str, list[float]] = defaultdict(list)
    contexts: dict[str, int] = defaultdict(int)
    pages: dict[str, list[int]] = defaultdict(list)
    for recording in recordings:
        for context in shared_contexts(recording.queries, min_queries=min_queries, min_pages=MIN_PAGES):
            scores = context_scores(context)
            if len(scores) < min_queries:
                continue
            found = agreements(scores)
            name = f"{recording.name}: {context.kind}"
            by_workload[name] += found
            chance[name] += [chance_jaccard(scores.shape[1], SHARE)] * len(found)
            contexts[name] += 1
            pages[name].append(scores.shape[1])
    if not by_workload:
        raise StudyError(
            f"no prefix of {MIN_PAGES} pages with {min_queries} queries in the recordings: record more "
            "questions about fewer documents, or lower --min-queries"
        )
    rows: list[dict[str, Any]] = []
    for kind, values in sorted(by_workload.items()):
        estimate = mean_of(values)
        low, high = estimate.ends
        rows.append(
            {
                "workload": kind,
                "contexts": contexts[kind],
                "queries": len(values),
                "pages": round(float(np.mean(pages[kind]))),
                "jaccard": estimate.value,
                "low": low,
                "high": high,
                "chance": float(np.mean(chance[kind])),
            }
        )
    first = recordings[0].header
    decisive = [
        name
        for recording in recordings
        if (recording.header.layers, recording.header.options["window"])
        == (first.layers, first.options["window"])
        for name in by_workload
        if name.startswith(f"{recording.name}: ")
    ]
    if not decisive:
        raise StudyError(f"{recordings[0].name} has no such context: give a recording that has one first")
    value = mean_of([agreement for name in decisive for agreement in by_workload[name]])
    expected = float(np.mean([c for name in decisive for c in chance[name]]))
    if value.low > AGREEMENT:
        verdict = f"supported: above {AGREEMENT}"
    elif value.low > expected:
        verdict = f"above chance ({expected:.3f}) but below {AGREEMENT}: importance is mostly the query's own"
    else:
        verdict = f"not supported: no better than chance ({expected:.3f})"
    if figure is not None:
        names = sorted(by_workload)
        draw(
            figure,
            [
                (
                    "Jaccard of a query's top 10 % with that of all others",
                    lambda axis: _paint(axis, names, by_workload, rows),
                )
            ],
        )
    return Finding(
        study="h2",
        claim=CLAIM,
        value=value,
        verdict=verdict,
        notes=(
            f"contexts with at least {min_queries} queries; aggregate without the query itself; body mass of "
            "the prefill window and of decode steps, as folded",
            f"value over {', '.join(decisive)}: the settings of the first recording",
            "attention that looks at the same pages whatever is asked agrees with itself: see which layers "
            "do, by one recording each, and 'study sensitivity --workload' for whether they find the answer",
            "queries are the resampled units: the interval is about these contexts",
            OF_THESE_MODELS,
        ),
        rows=tuple(rows),
    )


def _paint(
    axis: Any, names: list[str], by_workload: dict[str, list[float]], rows: list[dict[str, Any]]
) -> None:
    axis.boxplot([by_workload[name] for name in names], showmeans=True)
    axis.set_xticks(range(1, len(names) + 1), names, fontsize=7, rotation=35, ha="right")
    axis.plot(range(1, len(names) + 1), [row["chance"] for row in rows], "k_", markersize=24, label="chance")
    axis.set_ylim(-0.02, 1.02)
    axis.legend()

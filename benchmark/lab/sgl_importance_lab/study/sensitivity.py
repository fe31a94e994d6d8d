"""Measures how the signal's settings change the pages that earlier queries' scores find for a later one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from sgl_importance.observe.trace.records import Detail, Step
from sgl_importance_lab.study.anticipation import (
    FOUND_SHARE,
    MIN_PAGES,
    WANTED_SHARE,
    Contexts,
    Setting,
    merged,
    step_scores,
)
from sgl_importance_lab.study.recording import Query, Recording, Scores
from sgl_importance_lab.study.statistics import Estimate, jaccard, mean_of, top_pages
from sgl_importance_lab.study.study_report import OF_THESE_MODELS, Finding, StudyError, draw

MIN_QUERIES = 20
LONG_ANSWER_STEPS = 24

HALF_LIVES = (1.0, 4.0, 16.0, 64.0, np.inf)
PAGE_FACTORS = (2, 4, 8, 16, 32, 64)
INTERVALS = (2, 4, 8, 16)

# Beside layers and page size, which the header names itself.
SIGNAL_OPTIONS = ("source", "interval", "window", "sink_tokens", "local_tokens", "half_life_queries")


def _own_settings(contexts: Contexts) -> Iterator[Setting]:
    """The settings that can be computed from the base recording alone."""
    for half_life in HALF_LIVES:
        yield contexts.measure("half-life, queries", f"{half_life:g}", half_life=half_life)
    yield contexts.measure("quantity", "peak", Query.peak)
    if contexts.recording.header.detail is Detail.STEPS:
        yield contexts.measure("quantity", "mass", lambda query: step_scores(query, "mass"))
    for factor in PAGE_FACTORS:
        size = str(factor * contexts.recording.page_size)
        yield contexts.measure("page size, tokens", size, factor=factor)


def _other_settings(contexts: Contexts, recording: Recording) -> Iterator[Setting]:
    """Recall with the scores of a recording of the same requests under another setting."""
    difference = _difference(recording, contexts.recording)
    if difference is None:
        return
    queries = {query.rid: query for query in recording.queries}
    missing = sum(rid not in queries for rid in contexts.rids())
    if missing:
        raise StudyError(
            f"{recording.name} lacks {missing} requests of {contexts.recording.name}: "
            "record the same workload"
        )
    factor, rest = divmod(contexts.recording.page_size, recording.page_size)
    if rest or not factor:
        raise StudyError(f"{recording.name} has larger pages than {contexts.recording.name}: give it first")
    if factor == 1:
        yield contexts.measure(*difference, lambda query: queries[query.rid].body())
        return
    for label, largest in (("mean or sum", False), ("maximum", True)):
        yield contexts.measure(
            "quantity",
            f"{label} over blocks of {factor} pages of {recording.page_size} tokens",
            lambda query, largest=largest: merged(  # type: ignore[misc]
                queries[query.rid].body(), factor, largest=largest
            ),
        )


def interval_rows(queries: Sequence[Query]) -> list[dict[str, Any]]:
    """The share of a long answer's page ranking that is left when fewer of its decode steps emit."""
    long = [query for query in queries if len(query.decode) >= LONG_ANSWER_STEPS]
    if not long:
        return []
    rows = []
    for interval in INTERVALS:
        agreement = [
            jaccard(
                top_pages(_decode_body(query.decode), WANTED_SHARE),
                top_pages(_decode_body(query.decode[::interval]), WANTED_SHARE),
            )
            for query in long
        ]
        estimate = mean_of(agreement)
        rows.append(_row(Setting("interval, decode steps", str(interval)), len(long), estimate, None))
    return rows


def _decode_body(steps: Sequence[Step]) -> Scores:
    total = np.zeros(max(len(step.body) for step in steps))
    for step in steps:
        total[: len(step.body)] += step.body.astype(np.float64)
    return total


def _row(setting: Setting, queries: int, estimate: Estimate, change: Estimate | None) -> dict[str, Any]:
    own = mean_of(list(setting.own.values())) if setting.own else None
    earlier = mean_of(list(setting.earlier.values())) if setting.earlier else None
    return {
        "setting": setting.name,
        "value": setting.value,
        "queries": queries,
        "measure": "agreement with interval 1" if change is None else "recall",
        "estimate": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "change": None if change is None else change.value,
        "change_low": None if change is None else change.low,
        "change_high": None if change is None else change.high,
        "own answer": None if own is None else own.value,
        "own_low": None if own is None else own.low,
        "own_high": None if own is None else own.high,
        "earlier answer": None if earlier is None else earlier.value,
        "earlier_low": None if earlier is None else earlier.low,
        "earlier_high": None if earlier is None else earlier.high,
    }


def _difference(recording: Recording, base: Recording) -> tuple[str, str] | None:
    """The single setting in which a recording differs from the first one."""
    options, others = base.header.options, recording.header.options
    differing = [
        (name.replace("_", " "), str(others[name]))
        for name in SIGNAL_OPTIONS
        if name in options and name in others and options[name] != others[name]
    ]
    if base.header.layers != recording.header.layers:
        differing.append(("layers", ",".join(map(str, recording.header.layers))))
    if base.page_size != recording.page_size:
        differing.append(("page size recorded, tokens", str(recording.page_size)))
    if len(differing) > 1:
        raise StudyError(
            f"{recording.name} differs from {base.name} in {', '.join(name for name, _ in differing)}: "
            "change one setting at a time"
        )
    return differing[0] if differing else None


def study_sensitivity(
    recordings: Sequence[Recording],
    *,
    answers: Mapping[str, int] | None = None,
    figure: Path | None = None,
    min_queries: int = MIN_QUERIES,
) -> Finding:
    """The first recording is the base; each of the others may differ from it in one setting.

    A recording of the base's settings, of whatever requests, counts only for the interval.

    Args:
        recordings: of the same requests.
        answers: where in its prompt the right answer to a request stands, in tokens, by request id.
        figure: file to draw into.
        min_queries: that a context needs.

    Raises:
        StudyError: recordings cannot be compared, have too few queries on a shared context, or no answers
            in one though answers were given.
    """
    base = recordings[0]
    contexts = Contexts(base, min_queries, answers or {})
    default = contexts.measure("base", "as recorded")
    if not default.recall:
        raise StudyError(
            f"no prefix of {MIN_PAGES} pages with {min_queries} queries in {base.name}: "
            "record more questions about fewer documents, or lower --min-queries"
        )
    if answers and not default.own:
        _refuse_answers(base, answers)
    settings = list(_own_settings(contexts))
    for recording in recordings[1:]:
        settings += _other_settings(contexts, recording)
    base_recall = mean_of(list(default.recall.values()))
    rows = [_row(default, len(default.recall), base_recall, Estimate(0.0, 0.0, 0.0, len(default.recall)))]
    changes: list[tuple[Estimate, Setting]] = []
    for setting in settings:
        common = sorted(setting.recall.keys() & default.recall.keys())
        if not common:
            continue
        change = mean_of([setting.recall[rid] - default.recall[rid] for rid in common])
        if setting.name != "page size, tokens":
            changes.append((change, setting))
        estimate = mean_of([setting.recall[rid] for rid in common])
        rows.append(_row(setting, len(common), estimate, change))
    rows += interval_rows([query for recording in recordings for query in recording.queries])
    if figure is not None:
        panels = [("recall (agreement, for the interval)", _painter(rows, {"estimate": ("low", "high")}))]
        if answers:
            bounds = {
                "own answer": ("own_low", "own_high"),
                "earlier answer": ("earlier_low", "earlier_high"),
            }
            panels.append(("share of queries whose answer is held", _painter(rows, bounds)))
        draw(figure, panels)
    return Finding(
        study="sensitivity",
        claim="with the settings as recorded, earlier queries find a later query's top pages",
        value=base_recall,
        verdict=_verdict(changes),
        notes=(
            f"recall: share of a query's top {WANTED_SHARE:.0%} pages by body mass among the top "
            f"{FOUND_SHARE:.0%} by the queries before it; a random choice finds {FOUND_SHARE:.0%}",
            "changes are paired by request; what is to be found is what the first recording saw, except that "
            "a larger page changes it too, so page sizes are left out of the verdict",
            "what single layers and other quantities are measured against is what all layers of the first "
            "recording saw: recall says how alike they are, not which is better",
            f"own answer: share of queries whose own top {WANTED_SHARE:.0%} pages hold the right answer; "
            f"earlier answer: the same of the top {FOUND_SHARE:.0%} by the queries before it",
            "mean of a block's tokens and their sum rank alike; the maximum does not",
            OF_THESE_MODELS,
        ),
        rows=tuple(rows),
    )


def _refuse_answers(base: Recording, answers: Mapping[str, int]) -> NoReturn:
    if answers.keys().isdisjoint(query.rid for query in base.queries):
        raise StudyError(f"no request of the workload is in {base.name}: give the workload that was recorded")
    raise StudyError(
        f"no answer of the workload stands in a prefix that queries of {base.name} share: "
        "record more questions about fewer documents, or lower --min-queries"
    )


def _verdict(changes: Sequence[tuple[Estimate, Setting]]) -> str:
    better = [(change, setting) for change, setting in changes if change.low > 0]
    worse = [(change, setting) for change, setting in changes if change.high < 0]
    parts = []
    if better:
        change, setting = max(better, key=lambda item: item[0].value)
        parts.append(f"largest gain: {setting.name} {setting.value} ({change})")
    if worse:
        change, setting = min(worse, key=lambda item: item[0].value)
        parts.append(f"largest loss: {setting.name} {setting.value} ({change})")
    return "; ".join(parts) or "no setting changes recall beyond its interval"


def _painter(rows: Sequence[dict[str, Any]], bounds: Mapping[str, tuple[str, str]]) -> Callable[[Any], None]:
    def paint(axis: Any) -> None:
        for column, (low, high) in bounds.items():
            shown = [(-i, row) for i, row in enumerate(rows) if row[column] is not None]
            values = np.array([[row[column], row[low], row[high]] for _, row in shown])
            errors = np.abs(values[:, 1:].T - values[:, 0])
            axis.errorbar(
                values[:, 0], [i for i, _ in shown], xerr=errors, fmt="o", markersize=3, label=column
            )
        labels = [f"{row['setting']}: {row['value']}" for row in rows]
        axis.set_yticks([-i for i in range(len(rows))], labels, fontsize=5)
        axis.set_xlim(0, 1)
        axis.axvline(FOUND_SHARE, color="k", linestyle=":")
        if len(bounds) > 1:
            axis.legend(fontsize=7)

    return paint

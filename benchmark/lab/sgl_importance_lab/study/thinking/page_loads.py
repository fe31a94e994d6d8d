"""Does a rule that learns what a thought will want load fewer pages than the rules that are published?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_importance.terminal import counted
from sgl_importance_lab.replay.residency.page_steps import PageRecording
from sgl_importance_lab.study.links import HEAD_DIM
from sgl_importance_lab.study.statistics import Estimate, chance_of, ratio_of, ratio_of_sums
from sgl_importance_lab.study.study_report import OF_THESE_MODELS, Finding, StudyError, draw, verdict_of_parts
from sgl_importance_lab.study.thinking.keep_rules import KEEP_RULES, KeepRule
from sgl_importance_lab.study.thinking.learned_rule import fit_rule
from sgl_importance_lab.study.thinking.marks import Marks
from sgl_importance_lab.study.thinking.measured import (
    SHORTEST_ANSWER,
    WANTED_SHARE,
    Measured,
    is_long,
    rule_parts,
)
from sgl_importance_lab.study.thinking.request_measures import (
    ANSWER,
    CONTEXT,
    DECISIVE_SHARE,
    KEPT_SHARES,
    RequestMeasures,
    RuleCell,
    summed,
)
from sgl_importance_lab.study.thinking.rule_run import run_rule
from sgl_importance_lab.study.thinking.tier_stalls import stall
from sgl_importance_lab.study.thinking.wants import Wants, read_wants

SAVED = 0.15  # chosen before the first run
MEASURES = ("misses", "stall")
LEARNED, ORACLE = "learned", "oracle"
CONTROLS = ("random, prompt kept", ORACLE)
"""Not among the rules that the learned one is compared with."""
CLAIM = (
    "a rule that learns from other thoughts which pages will be wanted within 10 steps loads at least 15 % "
    "fewer than the best rule that learns nothing, with room for a fifth of the context"
)

Loads = dict[str, list[tuple[float, float]]]
"""By rule: pages loaded and pages wanted, of each request; or microseconds waited, and steps."""


def study_residency(
    recordings: Sequence[PageRecording],
    measured: Sequence[Measured],
    marks: Mapping[str, Marks],
    decisive_page: int,
    thought: str,
    figure: Path | None,
) -> Finding:
    """Fits to every second thought, judges by the others.

    Args:
        recordings: whose thoughts the rule learns from.
        measured: the same recordings, with the loads of the rules that learn nothing.
        marks: by request id, where milestones are known.
        decisive_page: size of the pages that the verdict is read from.
        thought: kind of the requests.
        figure: a PNG file.

    Raises:
        StudyError: there are fewer than four thoughts with pages of the decisive size.
    """
    rows: list[dict[str, Any]] = []
    decisive: Loads = {}
    weights: Mapping[str, float] = {}
    for of_size in measured:
        page_size = of_size.page_size
        requests = thoughts_of(recordings, marks, page_size, thought)
        if len(requests) < 4:
            if page_size == decisive_page:
                raise StudyError(
                    f"{len(requests)} answers of kind '{thought}' with pages of {page_size}: a rule that "
                    "learns from half of them, to be judged by the other half, needs four or more"
                )
            continue
        fitted, judged = requests[::2], requests[1::2]
        for scope in (CONTEXT, ANSWER):
            seen = [each.of_answer() if scope == ANSWER else each for each in fitted]
            learned = fit_rule(seen)
            loads, stalls = (_parts(of_size.of_kind(thought)[1::2], scope, name) for name in MEASURES)
            for run in _learned_runs(judged, scope, learned):
                loads[run.share].setdefault(LEARNED, []).append(run.loaded)
                stalls[run.share].setdefault(LEARNED, []).append(run.stalled)
            rows += _rows(page_size, scope, loads, stalls)
            if (page_size, scope) == (decisive_page, CONTEXT):
                decisive, weights = loads[DECISIVE_SHARE], learned.named_weights()
    best = _best(decisive)
    value = saved(decisive[LEARNED], decisive[best])
    pairs = zip(decisive[LEARNED], decisive[best], strict=True)
    p_value = chance_of(
        [(one[0], other[0]) for one, other in pairs], ratio_of_sums, lambda share: 1 - share < SAVED
    )
    if figure is not None:
        draw(
            figure,
            [(f"loads of wanted pages, {decisive_page} tokens each", _painter(rows, decisive_page))],
        )
    said = ", ".join(f"{name} {weight:+.2f}" for name, weight in list(weights.items())[:6])
    return Finding(
        study="thinking-residency",
        claim=CLAIM,
        value=value,
        verdict=verdict_of_parts(
            (value.low >= SAVED, value.high < SAVED, f"it loads {value} fewer than '{best}'"),
        ),
        notes=(
            f"value: share of the loads of '{best}', the best of {len(KEEP_RULES) - len(CONTROLS)} rules on "
            f"these {len(decisive[best])} thoughts; pages come when they are wanted, and nothing changes a "
            f"token. Wanted are {WANTED_SHARE:.0%} of the pages; requests are the resampled units",
            "us per token: what steps wait where HBM holds this share of the pages, HBM and DRAM "
            f"{max(KEPT_SHARES):.0%}, flash all; heads of {HEAD_DIM} in bfloat16, PCIe 5.0 x16, the data "
            "sheet of a Micron 9550",
            f"largest weights of the logistic regression, standardised: {said}",
            OF_THESE_MODELS,
        ),
        rows=tuple(rows),
        p_value=p_value,
    )


def saved(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> Estimate:
    """1 - loads of the first / loads of the second, of the same requests."""
    loaded = ratio_of([(one[0], other[0]) for one, other in zip(first, second, strict=True)])
    return loaded.from_one()


def thoughts_of(
    recordings: Sequence[PageRecording], marks: Mapping[str, Marks], page_size: int, thought: str
) -> list[Wants]:
    """Those with pages of one size, in the order of ``measure_recordings``."""
    return [
        wants
        for recording in recordings
        if recording.page_size == page_size
        for wants in read_wants(recording, WANTED_SHARE, SHORTEST_ANSWER, marks)
        if wants.kind == thought and is_long(wants)
    ]


def _parts(judged: Sequence[RequestMeasures], scope: str, measure: str) -> dict[float, Loads]:
    """Of the rules that learn nothing, by share of the pages that fit."""
    return {
        share: {name: rule_parts(judged, RuleCell(scope, name, share), measure) for name in KEEP_RULES}
        for share in KEPT_SHARES
    }


@dataclass(frozen=True, slots=True)
class _Judged:
    """One thought with room for a share of its pages: pages loaded and wanted; microseconds and steps."""

    share: float
    loaded: tuple[float, float]
    stalled: tuple[float, float]


def _learned_runs(judged: Sequence[Wants], scope: str, rule: KeepRule) -> Iterator[_Judged]:
    with counted("judging the learned rule", len(judged)) as advance:
        for wants in judged:
            seen = wants.of_answer() if scope == ANSWER else wants
            runs = run_rule(seen, rule, KEPT_SHARES)
            for run in runs:
                yield _Judged(run.share, summed(run.misses), summed(stall(seen, run, runs[-1])))
            advance()


def _best(loads: Loads) -> str:
    others = [name for name in loads if name not in (LEARNED, *CONTROLS)]
    return min(others, key=lambda name: sum(loaded for loaded, _ in loads[name]))


def _rows(
    page_size: int, scope: str, by_share: Mapping[float, Loads], stalls: Mapping[float, Loads]
) -> list[dict[str, Any]]:
    rows = []
    for share, loads in by_share.items():
        best = _best(loads)
        for name, parts in loads.items():
            fewer = saved(parts, loads[best])
            waits = ratio_of(stalls[share][name])
            rows.append(
                {
                    "page": page_size,
                    "scope": scope,
                    "kept": share,
                    "rule": name,
                    "thoughts": len(parts),
                    "loaded": sum(loaded for loaded, _ in parts) / max(sum(read for _, read in parts), 1),
                    "fewer than best": fewer.value,
                    "low": fewer.low,
                    "high": fewer.high,
                    "best": best,
                    "us per token": waits.value,
                    "us low": waits.low,
                    "us high": waits.high,
                }
            )
    return rows


def _painter(rows: Sequence[dict[str, Any]], page_size: int) -> Callable[[Any], None]:
    def paint(axis: Any) -> None:
        shown = [row for row in rows if row["page"] == page_size and row["scope"] == CONTEXT]
        for name in dict.fromkeys(row["rule"] for row in shown):
            of_rule = [row for row in shown if row["rule"] == name]
            style = "k--" if name in CONTROLS else ("o-" if name == LEARNED else "x-")
            axis.plot([r["kept"] for r in of_rule], [r["loaded"] for r in of_rule], style, label=name, lw=1)
        axis.set_xlabel("share of the context's pages that fit", fontsize=8)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=6)

    return paint

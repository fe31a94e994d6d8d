"""Do the pages with the highest attention scores hold what a thought will want?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sgl_importance_lab.study.statistics import (
    Estimate,
    Floats,
    bootstrap,
    chance_of,
    ratio_of,
    ratio_of_sums,
)
from sgl_importance_lab.study.study_report import Finding, draw, verdict_of_parts
from sgl_importance_lab.study.thinking.marks import PHASES
from sgl_importance_lab.study.thinking.measured import Kinds, Measured, notes_of, rule_parts
from sgl_importance_lab.study.thinking.measures import Parts
from sgl_importance_lab.study.thinking.request_measures import (
    ALL_PHASES,
    ANSWER,
    DECISIVE_SHARE,
    LateWants,
    RequestMeasures,
    RuleCell,
    summed,
)

ABOVE_RANDOM = 0.1  # chosen before the first run
RULES = ("attention score", "random, prompt kept")

CLAIM = (
    "beside a prompt that is kept, the fifth of the thought with the highest attention scores holds no more "
    "of what a token 10 steps on wants than a random fifth and 10 %; pages that state what is needed later "
    "are wanted again far more often than others"
)


def study_attention_score(
    measured: Sequence[Measured], decisive: Measured, kinds: Kinds, figure: Path | None
) -> Finding:
    found = decisive.of_kind(kinds.thought)
    cells = [RuleCell(ANSWER, rule, DECISIVE_SHARE) for rule in RULES]
    pairs = [
        [*score, *chance]
        for score, chance in zip(*(rule_parts(found, cell, "recall far") for cell in cells), strict=True)
    ]
    value = bootstrap(pairs, _above_random)
    # Large pages nearly all hold one.
    smallest = min(measured, key=lambda each: each.page_size)
    late = _late(smallest.of_kind(kinds.thought))
    milestones = _milestone_times(late)
    p_score = chance_of(pairs, _above_random, lambda difference: difference > ABOVE_RANDOM)
    p_values = [p_score]
    if milestones is not None:
        p_milestones = chance_of(_milestone_parts(late), _times, lambda often: often <= 1)
        p_values.append(p_milestones)
    said = (
        value.high <= ABOVE_RANDOM,
        value.low > ABOVE_RANDOM,
        f"it holds {value} more than a random fifth",
    )
    parts = [said]
    if milestones is not None:
        parts.append(
            (
                milestones.low > 1,
                milestones.high <= 1,
                f"milestones are wanted {milestones} times as often as others",
            )
        )
    if figure is not None:
        draw(figure, [("late wants of a page, per step", _milestone_painter(measured, kinds.thought))])
    return Finding(
        study="thinking-attention",
        claim=CLAIM,
        value=value,
        verdict=verdict_of_parts(*parts),
        notes=(
            "value: recall of the attention score minus that of the random control, 10 steps on, pages "
            "behind the prompt",
            f"p = {p_score:.4f} for more than {ABOVE_RANDOM:.0%} above it"
            + (
                f", {p_milestones:.4f} for milestones that are wanted no more"
                if milestones is not None
                else ""
            ),
            f"milestones: tokens that state a value, a push or a pop; pages of {smallest.page_size}, behind "
            "the newest 64 tokens"
            if milestones is not None
            else "no marks were given, so nothing is said of milestones",
            *notes_of(decisive, kinds),
        ),
        rows=tuple(
            _milestone_row(each, kind, phase)
            for each in measured
            for kind in each.kinds
            for phase in (ALL_PHASES, *PHASES)
            if _late(each.of_kind(kind), phase)
        ),
        p_value=max(p_values),
    )


def _above_random(table: Floats) -> float:
    return ratio_of_sums(table[:, :2]) - ratio_of_sums(table[:, 2:])


def _times(table: Floats) -> float:
    return ratio_of_sums(table[:, :2]) / max(ratio_of_sums(table[:, 2:]), 1e-12)


def _late(found: Sequence[RequestMeasures], phase: str = ALL_PHASES) -> list[LateWants]:
    """Of the requests that have the phase."""
    return [each.late[phase] for each in found if phase in each.late]


def _milestone_parts(found: Sequence[LateWants]) -> list[list[float]]:
    """Late wants and steps of pages with a milestone, then of those without, of each request."""
    return [
        [*summed(each.milestones), *summed(each.others)]
        for each in found
        if each.milestones is not None and each.others is not None
    ]


def _milestone_times(found: Sequence[LateWants]) -> Estimate | None:
    """How many times as often a page with a milestone is wanted as one without; None where none is known."""
    rows = _milestone_parts(found)
    if not rows or not np.sum(rows, axis=0)[[1, 3]].all():
        return None
    return bootstrap(rows, _times)


def _rate(found: Sequence[Parts | None]) -> float | None:
    known = [summed(each) for each in found if each is not None]
    return ratio_of_sums(np.array(known)) if known and sum(steps for _, steps in known) else None


def _milestone_row(measured: Measured, kind: str, phase: str) -> dict[str, Any]:
    found = measured.of_kind(kind)
    late = _late(found, phase)
    times = _milestone_times(late)
    parts = {
        rule: rule_parts(found, RuleCell(ANSWER, rule, DECISIVE_SHARE, phase), "recall far") for rule in RULES
    }
    return {
        "page": measured.page_size,
        "kind": kind,
        "phase": phase,
        "requests": len(late),
        # None where no answer has a page of its own.
        **{f"{rule}, recall at 10": str(ratio_of(known)) if known else None for rule, known in parts.items()},
        "late wants, milestones": _rate([each.milestones for each in late]),
        "late wants, others": _rate([each.others for each in late]),
        "late wants, random control": _rate([each.random for each in late]),
        "times": None if times is None else str(times),
    }


def _milestone_painter(measured: Sequence[Measured], kind: str) -> Callable[[Any], None]:
    def paint(axis: Any) -> None:
        for name, style in (("milestones", "o"), ("others", "x")):
            rates = [_rate([getattr(late, name) for late in _late(each.of_kind(kind))]) for each in measured]
            axis.plot(
                range(len(rates)), [np.nan if rate is None else rate for rate in rates], style, label=name
            )
        axis.set_xticks(range(len(measured)), [f"pages of {m.page_size}" for m in measured], fontsize=8)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)

    return paint

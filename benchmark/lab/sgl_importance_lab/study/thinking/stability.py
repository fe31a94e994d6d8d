"""Do heads go on wanting the same pages in a thought?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sgl_importance_lab.study.statistics import (
    Estimate,
    Floats,
    bootstrap,
    chance_of,
    chance_of_difference,
    difference_of_ratios,
    ratio_of_sums,
)
from sgl_importance_lab.study.study_report import Finding, draw, verdict_of_parts
from sgl_importance_lab.study.thinking.marks import PHASES
from sgl_importance_lab.study.thinking.measured import Kinds, Measured, notes_of
from sgl_importance_lab.study.thinking.measures import DISTANCE_BOUNDS, Parts
from sgl_importance_lab.study.thinking.request_measures import (
    ALL_PHASES,
    CONTEXT,
    DECISIVE_SHARE,
    RANDOM,
    Moves,
    RequestMeasures,
    RuleCell,
    summed,
    unstable_heads,
)

WRONGLY_EVICTED = 3.0  # chosen before the first run
RANKED = RuleCell(CONTEXT, "stability", DECISIVE_SHARE)

CLAIM = (
    "heads want the same pages for a shorter time in a thought than in normal decode, and pages of unstable "
    "heads are wrongly evicted more than 3 times as often as those of stable ones"
)


def study_stability(
    measured: Sequence[Measured], decisive: Measured, kinds: Kinds, figure: Path | None
) -> Finding:
    in_thought, in_decode = (
        [summed(each.moves[ALL_PHASES].parts["consistency"]) for each in decisive.of_kind(kind)]
        for kind in kinds
    )
    value = difference_of_ratios(in_thought, in_decode)
    times = _times_as_often(decisive.of_kind(kinds.thought))
    in_normal = _times_as_often(decisive.of_kind(kinds.normal))
    p_lower = chance_of_difference(in_thought, in_decode, lambda difference: difference >= 0)
    p_times = chance_of(
        _eviction_parts(decisive.of_kind(kinds.thought)), _times, lambda often: often <= WRONGLY_EVICTED
    )
    if figure is not None:
        draw(figure, [("wants by steps since the last", _distance_painter(decisive, kinds))])
    return Finding(
        study="thinking-stability",
        claim=CLAIM,
        value=value,
        verdict=verdict_of_parts(
            (value.high < 0, value.low >= 0, f"consistency in a thought minus normal decode {value}"),
            (
                times.low > WRONGLY_EVICTED,
                times.high <= WRONGLY_EVICTED,
                f"pages of unstable heads are wrongly evicted {times} times as often "
                f"(in normal decode {in_normal})",
            ),
        ),
        notes=(
            "value: overlap RCO of the first of 16 steps with the 15 behind it; unstable is the quarter of "
            f"the heads with the lowest of it over all of a kind; evictions where each head keeps "
            f"{DECISIVE_SHARE:.0%} of the context and is ranked every 16 steps; wrong ones are wanted within "
            "5 steps",
            f"p = {p_lower:.4f} for a consistency that is not lower, {p_times:.4f} for evictions that are "
            f"wrong {WRONGLY_EVICTED:g} times as often or less",
            *notes_of(decisive, kinds),
        ),
        rows=tuple(
            _move_row(each, kind, phase)
            for each in measured
            for kind in each.kinds
            for phase in _phases_of(each.of_kind(kind))
        ),
        p_value=max(p_lower, p_times),
    )


def _phases_of(found: Sequence[RequestMeasures]) -> list[str]:
    return [phase for phase in (ALL_PHASES, *PHASES) if any(phase in each.moves for each in found)]


def _eviction_parts(found: Sequence[RequestMeasures], phase: str = ALL_PHASES) -> Floats:
    """Wrong and all evictions of unstable heads, then of stable ones; float64 [requests, 4]."""
    unstable = unstable_heads(found)
    evictions = [rules["false evictions"] for rules in _of_rule(found, RANKED.rule, phase)]
    return np.array([[*summed(each[unstable]), *summed(each[~unstable])] for each in evictions])


def _of_rule(found: Sequence[RequestMeasures], rule: str, phase: str) -> list[Mapping[str, Parts]]:
    cell = RuleCell(RANKED.scope, rule, RANKED.share, phase)
    return [each.rules[cell] for each in found if cell in each.rules]


def _times(table: Floats) -> float:
    return ratio_of_sums(table[:, :2]) / max(ratio_of_sums(table[:, 2:]), 1e-12)


def _times_as_often(found: Sequence[RequestMeasures]) -> Estimate:
    return bootstrap(_eviction_parts(found), _times)


def _move_row(measured: Measured, kind: str, phase: str) -> dict[str, Any]:
    everywhere = measured.of_kind(kind)
    found = [each for each in everywhere if phase in each.moves]
    evictions = _eviction_parts(everywhere, phase)
    by_chance = [summed(rules["false evictions"]) for rules in _of_rule(found, RANDOM, phase)]
    unstable = unstable_heads(everywhere)
    moves = [each.moves[phase] for each in found]
    reuse = np.sum([each.reuse for each in moves], axis=0)
    consistency = np.sum([each.parts["consistency"] for each in moves], axis=0)
    return {
        "page": measured.page_size,
        "kind": kind,
        "phase": phase,
        "requests": len(found),
        "tokens": int(np.median([each.num_steps for each in found])),
        "adjacent Jaccard": _mean_ratio(moves, "jaccard"),
        "consistency": ratio_of_sums(consistency),
        "of unstable heads": ratio_of_sums(consistency[unstable]),
        "promoted": _mean_ratio(moves, "promoted"),
        "wrong, unstable": ratio_of_sums(evictions[:, :2]),
        "wrong, stable": ratio_of_sums(evictions[:, 2:]),
        "wrong, random control": ratio_of_sums(np.array(by_chance)),
        "recurrence": _mean_ratio(moves, "recurrence"),
        **{
            f"wanted within {bound}": float(reuse[: at + 1].sum() / max(reuse.sum(), 1))
            for at, bound in enumerate(DISTANCE_BOUNDS)
        },
        "wanted first": float(reuse[-1] / max(reuse.sum(), 1)),
    }


def _mean_ratio(found: Sequence[Moves], move: str) -> float:
    return ratio_of_sums(np.sum([each.parts[move] for each in found], axis=0))


def _distance_painter(measured: Measured, kinds: Kinds) -> Callable[[Any], None]:
    def paint(axis: Any) -> None:
        for kind in kinds:
            reuse = np.sum([each.moves[ALL_PHASES].reuse for each in measured.of_kind(kind)], axis=0)
            shares = reuse[:-1].cumsum()[: len(DISTANCE_BOUNDS)] / max(reuse.sum(), 1)
            axis.plot(DISTANCE_BOUNDS, shares, "o-", label=kind)
        axis.set_xscale("log", base=2)
        axis.set_ylim(0, 1)
        axis.set_xlabel("steps since the page was wanted before, at most", fontsize=8)
        axis.legend(fontsize=7)

    return paint

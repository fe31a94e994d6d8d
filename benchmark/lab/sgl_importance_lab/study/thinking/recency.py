"""Do the newest pages hold what a thought will want?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sgl_importance_lab.study.statistics import chance_of, ratio_of, ratio_of_sums
from sgl_importance_lab.study.study_report import Finding, draw, verdict_of_parts
from sgl_importance_lab.study.thinking.keep_rules import KEEP_RULES
from sgl_importance_lab.study.thinking.marks import PHASES
from sgl_importance_lab.study.thinking.measured import Kinds, Measured, notes_of, rule_parts
from sgl_importance_lab.study.thinking.request_measures import (
    ALL_PHASES,
    ANSWER,
    CONTEXT,
    DECISIVE_SHARE,
    RuleCell,
)

# Chosen before the first run.
MOST_IN_THOUGHT, LEAST_IN_DECODE = 0.3, 0.8

CLAIM = (
    "the newest fifth of the pages holds more than 80 % of what a token 5 steps on wants in normal decode, "
    "and less than 30 % in a thought"
)


def study_recency(
    measured: Sequence[Measured], decisive: Measured, kinds: Kinds, figure: Path | None
) -> Finding:
    cell = RuleCell(CONTEXT, "recency", DECISIVE_SHARE)
    in_thought, in_decode = (rule_parts(decisive.of_kind(kind), cell, "recall near") for kind in kinds)
    value, decode = ratio_of(in_thought), ratio_of(in_decode)
    p_thought = chance_of(in_thought, ratio_of_sums, lambda share: share >= MOST_IN_THOUGHT)
    p_decode = chance_of(in_decode, ratio_of_sums, lambda share: share <= LEAST_IN_DECODE)
    decisive_first = sorted(measured, key=lambda each: each is not decisive)
    rows = [row for each in decisive_first for kind in each.kinds for row in _rule_rows(each, kind)]
    if figure is not None:
        draw(
            figure,
            [
                (f"recall 5 steps on, {scope}", _rule_painter(decisive, kinds, scope))
                for scope in (CONTEXT, ANSWER)
            ],
        )
    return Finding(
        study="thinking-recency",
        claim=CLAIM,
        value=value,
        verdict=verdict_of_parts(
            (
                value.high < MOST_IN_THOUGHT,
                value.low >= MOST_IN_THOUGHT,
                f"in a thought it holds {value}",
            ),
            (decode.low > LEAST_IN_DECODE, decode.high <= LEAST_IN_DECODE, f"in normal decode {decode}"),
        ),
        notes=(
            f"value: of {kinds.thought}; p = {p_thought:.4f} for 30 % or more there, {p_decode:.4f} for 80 % "
            f"or less in {kinds.normal}",
            f"scope 'context': a rule keeps {DECISIVE_SHARE:.0%} of all pages; 'answer': it keeps the "
            "prompt, and that share of the pages behind it, and only these are counted",
            *notes_of(decisive, kinds),
        ),
        rows=tuple(rows),
        p_value=max(p_thought, p_decode),
    )


def _rule_rows(measured: Measured, kind: str) -> list[dict[str, Any]]:
    found = measured.of_kind(kind)
    cells = list(dict.fromkeys(cell for each in found for cell in each.rules))
    rows = []
    for cell in sorted(cells, key=_cell_order):
        near = ratio_of(rule_parts(found, cell, "recall near"))
        row: dict[str, Any] = {
            "page": measured.page_size,
            "kind": kind,
            "scope": cell.scope,
            "phase": cell.phase,
            "kept": cell.share,
            "rule": cell.rule,
            "recall at 5": near.value,
            "low": near.low,
            "high": near.high,
            "recall at 10": ratio_of_sums(np.array(rule_parts(found, cell, "recall far"))),
        }
        for name, measure in (("misses", "misses"), ("false evictions", "false evictions")):
            row[name] = ratio_of_sums(np.array(rule_parts(found, cell, measure)))
        known = cell.phase == ALL_PHASES
        row["mass at 5"] = ratio_of_sums(np.array(rule_parts(found, cell, "mass near"))) if known else None
        rows.append(row)
    return rows


def _cell_order(cell: RuleCell) -> tuple[Any, ...]:
    phase = -1 if cell.phase == ALL_PHASES else PHASES.index(cell.phase)
    # What the verdict is read from comes first.
    scope, share = cell.scope != CONTEXT, (cell.share != DECISIVE_SHARE, cell.share)
    return (share, scope, phase, list(KEEP_RULES).index(cell.rule))


def _rule_painter(measured: Measured, kinds: Kinds, scope: str) -> Callable[[Any], None]:
    def paint(axis: Any) -> None:
        names = list(KEEP_RULES)
        for kind, style in zip(kinds, ("o", "x"), strict=True):
            found = measured.of_kind(kind)
            shares = [
                ratio_of_sums(
                    np.array(rule_parts(found, RuleCell(scope, rule, DECISIVE_SHARE), "recall near"))
                )
                for rule in names
            ]
            axis.plot(shares, range(len(names)), style, label=kind)
        axis.set_yticks(range(len(names)), names, fontsize=7)
        axis.set_xlim(0, 1)
        axis.legend(fontsize=7)

    return paint

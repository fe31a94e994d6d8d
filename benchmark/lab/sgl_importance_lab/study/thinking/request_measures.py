"""Everything that is measured of one request's wants, to be summed over requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sgl_importance_lab.study.thinking import measures
from sgl_importance_lab.study.thinking.keep_rules import ACTIVE_MASS, KEEP_RULES
from sgl_importance_lab.study.thinking.marks import PHASES, Marks
from sgl_importance_lab.study.thinking.measures import Parts
from sgl_importance_lab.study.thinking.rule_run import RuleRun, run_rule
from sgl_importance_lab.study.thinking.tier_stalls import stall
from sgl_importance_lab.study.thinking.wants import Bools, Counts, Wants

CONTEXT, ANSWER = "context", "answer"
"""Whether a rule ranks all pages, or those of the answer beside a prompt that is kept."""
KEPT_SHARES = (0.1, 0.2, 0.4)
DECISIVE_SHARE = 0.2
"""What the verdicts are read from: chosen before the first run."""
ALL_PHASES = "all"
NEAR, FAR = 5, 10
"""Steps ahead."""
RANDOM = "random, prompt kept"
LATE_TOKENS = 64
"""What lies less far back is kept by every rule of the field."""


@dataclass(frozen=True, slots=True)
class RuleCell:
    """Which pages are kept, by what, and of which steps it is told."""

    scope: str
    rule: str
    share: float
    phase: str = ALL_PHASES


@dataclass(frozen=True, slots=True)
class Moves:
    """How wanted pages move at some of the steps: parts by measure, and wants by distance."""

    parts: Mapping[str, Parts]
    reuse: Counts


@dataclass(frozen=True, slots=True)
class LateWants:
    """How often pages are wanted that lie behind the newest 64 tokens of an answer.

    Attributes:
        milestones: those that have one; None where nobody knows which do.
        others: those that have none; None where nobody knows.
        random: those that the random control keeps.
    """

    milestones: Parts | None
    others: Parts | None
    random: Parts


@dataclass(frozen=True, slots=True)
class RequestMeasures:
    """Parts of one request; see ``measures`` for what they are.

    Attributes:
        rid, kind, num_steps: of the request.
        rules: by cell, then by measure.
        moves: how wanted pages move, by phase.
        late: how often pages behind the newest 64 tokens of the answer are wanted, by phase.
    """

    rid: str
    kind: str
    num_steps: int
    rules: Mapping[RuleCell, Mapping[str, Parts]]
    moves: Mapping[str, Moves]
    late: Mapping[str, LateWants]


def measure_request(
    wants: Wants, marks: Marks | None, input_tokens: int, shares: Sequence[float] = KEPT_SHARES
) -> RequestMeasures:
    """Everything of one request.

    Args:
        wants: of its whole context.
        marks: of its answer, where it is known.
        input_tokens: length of its prompt.
        shares: of the pages that are kept.
    """
    answer = wants.of_answer()
    phases: dict[str, Counts] = {}
    if marks is not None:
        known = {phase: marks.steps_of(phase, input_tokens, wants.num_steps) for phase in PHASES}
        phases = {phase: steps for phase, steps in known.items() if len(steps)}
    rules: dict[RuleCell, dict[str, Parts]] = {}
    kept_at_random = np.zeros(answer.wanted.shape[1:], np.bool_)
    for scope, seen in ((CONTEXT, wants), (ANSWER, answer)):
        if not seen.wanted.shape[2]:
            continue  # an answer that does not leave the last page of its prompt
        for name, rule in KEEP_RULES.items():
            runs = run_rule(seen, rule, shares)
            for run in runs:
                cell = RuleCell(scope, name, run.share)
                rules[cell] = {**_of_rule(seen, run), "stall": stall(seen, run, runs[-1])}
                if run.share == DECISIVE_SHARE:
                    rules |= dict(_by_phase(seen, run, cell, phases))
                    if (scope, name) == (ANSWER, RANDOM):
                        kept_at_random = run.kept[-1]
    stretches: dict[str, Bools | None] = {ALL_PHASES: None}
    stretches |= {phase: _chosen(steps, wants.num_steps) for phase, steps in phases.items()}
    return RequestMeasures(
        rid=wants.rid,
        kind=wants.kind,
        num_steps=wants.num_steps,
        rules=rules,
        moves={phase: _moves(wants, of) for phase, of in stretches.items()},
        late={phase: _late(answer, kept_at_random, of) for phase, of in stretches.items()},
    )


def _late(answer: Wants, kept_at_random: Bools, of: Bools | None) -> LateWants:
    def wanted(columns: Bools) -> Parts:
        return measures.late_wants(answer, columns, LATE_TOKENS, of)

    has_one = answer.milestones
    return LateWants(
        milestones=None if has_one is None else wanted(has_one),
        others=None if has_one is None else wanted(~has_one),
        random=wanted(kept_at_random),
    )


def _chosen(steps: Counts, num_steps: int) -> Bools:
    chosen = np.zeros(num_steps, np.bool_)
    chosen[steps] = True
    return chosen


def _moves(wants: Wants, of: Bools | None) -> Moves:
    return Moves(
        {
            "jaccard": measures.adjacent_jaccard(wants, of),
            "consistency": measures.rank_consistency(wants, of),
            "promoted": measures.promoted(wants, of),
            "recurrence": measures.recurrence(wants, ACTIVE_MASS, of),
        },
        measures.reuse_distances(wants, of),
    )


def _of_rule(wants: Wants, run: RuleRun) -> dict[str, Parts]:
    return {
        "recall near": measures.recall(wants, run.kept, NEAR),
        "recall far": measures.recall(wants, run.kept, FAR),
        "mass near": measures.mass_recall(wants, run.kept, NEAR),
        "misses": run.misses,
        "false evictions": measures.false_evictions(wants, run.kept),
    }


def _by_phase(
    wants: Wants, run: RuleRun, cell: RuleCell, phases: Mapping[str, Counts]
) -> Iterator[tuple[RuleCell, dict[str, Parts]]]:
    for phase, steps in phases.items():
        yield (
            RuleCell(cell.scope, cell.rule, cell.share, phase),
            {
                "recall near": measures.recall(wants, run.kept, NEAR, steps),
                "recall far": measures.recall(wants, run.kept, FAR, steps),
                "misses": np.stack([run.loads[steps].sum(0), wants.wanted[steps].sum((0, 2))], axis=1),
                "false evictions": measures.false_evictions(wants, run.kept, _chosen(steps, wants.num_steps)),
            },
        )


def summed(parts: Parts) -> tuple[float, float]:
    """Numerator and denominator over all heads."""
    numerator, denominator = parts.sum(axis=0).tolist()
    return numerator, denominator


def unstable_heads(found: Sequence[RequestMeasures]) -> Bools:
    """The quarter of the heads whose wanted pages are least consistent over these requests; [heads]."""
    total = np.sum([each.moves[ALL_PHASES].parts["consistency"] for each in found], axis=0)
    consistency = total[:, 0] / np.maximum(total[:, 1], 1)
    unstable = np.zeros(len(consistency), np.bool_)
    unstable[np.argsort(consistency, kind="stable")[: max(1, len(consistency) // 4)]] = True
    return unstable

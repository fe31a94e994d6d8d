"""Two runs over the same prompts: difference of scores, McNemar's test, equal answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

from sgl_importance_lab.bench.bench_run import BenchError, Run, Sample
from sgl_importance_lab.study.statistics import Estimate, mean_of

RIGHT = 1.0
SIGNIFICANT = 0.05
LEAST_CEILING = 0.5
NO_VERDICT = "none"
"""Where the first scores too little to lose anything."""


@dataclass(frozen=True, slots=True)
class Paired:
    """One task at one length.

    Attributes:
        first: mean score of the first run, 0 to 1; ``second`` of the other.
        difference: second minus first, over prompts.
        lost: prompts that only the first run got wholly right; ``won`` that only the second did.
        p: of McNemar's exact test, two-sided.
        equal: share of prompts with the same answer, to the letter.
    """

    task: str
    length: int
    n: int
    first: Estimate
    second: Estimate
    difference: Estimate
    lost: int
    won: int
    p: float
    equal: float

    @property
    def verdict(self) -> str:
        if self.first.value < LEAST_CEILING:
            return NO_VERDICT
        if self.p < SIGNIFICANT:
            return "worse" if self.lost > self.won else "better"
        return "not told apart"


def mcnemar(lost: int, won: int) -> float:
    """Exact two-sided p of McNemar's test (1947): ``lost`` and ``won`` of a fair coin's tosses."""
    tosses = lost + won
    tail = float(sum(comb(tosses, each) for each in range(min(lost, won) + 1)) / 2**tosses)
    return min(1.0, 2 * tail)


def paired(first: Run, second: Run) -> list[Paired]:
    """Task by task and length by length.

    Raises:
        BenchError: they were not asked the same.
    """
    if first.asked != second.asked:
        raise BenchError(
            f"{first.url} and {second.url} were not asked the same: repeat the suite's arguments for both"
        )
    found = []
    for one, other in zip(first.parts, second.parts, strict=True):
        for task in first.asked.tasks:
            ours = [each for each in one.samples if each.task == task]
            theirs = [each for each in other.samples if each.task == task]
            if [each.prompt for each in ours] != [each.prompt for each in theirs]:
                raise BenchError(
                    f"{task}: the prompts of both runs differ: repeat them with one --tokenizer and harness"
                )
            if ours:
                found.append(_one(task, one.length, ours, theirs))
    return found


def _one(task: str, length: int, first: Sequence[Sample], second: Sequence[Sample]) -> Paired:
    pairs = list(zip(first, second, strict=True))
    lost = sum(one.score == RIGHT > other.score for one, other in pairs)
    won = sum(other.score == RIGHT > one.score for one, other in pairs)
    return Paired(
        task,
        length,
        len(pairs),
        mean_of([each.score for each in first]),
        mean_of([each.score for each in second]),
        mean_of([other.score - one.score for one, other in pairs]),
        lost,
        won,
        mcnemar(lost, won),
        sum(one.answer == other.answer for one, other in pairs) / len(pairs),
    )


def scores_of(run: Run) -> list[tuple[str, int, list[float]]]:
    """Task, length and the scores of its prompts."""
    found = []
    for part in run.parts:
        for task in run.asked.tasks:
            scores = [each.score for each in part.samples if each.task == task]
            if scores:
                found.append((task, part.length, scores))
    return found

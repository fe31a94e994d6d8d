"""When choices of pages are audited, and what follows for a request's budget."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

MAX_BUDGET_FACTOR = 64
"""Largest multiple of a request's budget, for one whose checks fail however much it reads."""


@dataclass(frozen=True, slots=True)
class AuditRule:
    """Which steps are checked, and what they must show.

    Attributes:
        interval: generated tokens from one audit to the next; 0 for none.
        largest_missed_page: an audit fails where a head has more of its attention than this on one page that
            was not read; at 1 none does.
    """

    interval: int
    largest_missed_page: float

    def turn(self, step: int) -> int | None:
        """Number of the audit in a step; None in most.

        Args:
            step: generated tokens before it that selected.
        """
        return step // self.interval if self.interval and step % self.interval == 0 else None


@dataclass(slots=True)
class AuditCounts:
    """What checks found.

    Attributes:
        audits: comparisons with exact attention, each in one layer.
        failed: audits that found too much missing; their layer's output was the exact one.
        missed_mass: share of attention outside the pages that were read, mean over heads, summed over audits.
        missed_page: largest share of a head's attention on one page that was not read, summed over audits.
        output_error: of audited outputs, in lengths of the exact one, summed over audits.
    """

    audits: int = 0
    failed: int = 0
    missed_mass: float = 0.0
    missed_page: float = 0.0
    output_error: float = 0.0


class BudgetFactor:
    """The multiple of a request's budget that holds at each position, by its audits.

    It doubles behind a check that fails and halves behind one that passes, down to 1. A position is judged
    once: what a retraction makes a request compute again is computed with the factors of the first time, so
    that it comes out the same.
    """

    def __init__(self) -> None:
        self._starts = [0]
        self._factors = [1]
        self._failed: set[int] = set()
        self._judged = -1

    def at(self, position: int) -> int:
        """The factor of the token at a position."""
        return self._factors[bisect_right(self._starts, position) - 1]

    def is_judged(self, position: int) -> bool:
        """Whether a check of this token, or of one behind it, has been counted."""
        return position <= self._judged

    def has_failed(self, position: int) -> bool:
        """Whether the check of this token failed."""
        return position in self._failed

    def judge(self, position: int, *, fails: bool) -> None:
        """Takes in the check of a token, the first behind those judged before."""
        assert position > self._judged, (position, self._judged)
        self._judged = position
        now = self._factors[-1]
        factor = min(now * 2, MAX_BUDGET_FACTOR) if fails else max(now // 2, 1)
        if fails:
            self._failed.add(position)
        if factor != now:
            self._starts.append(position + 1)
            self._factors.append(factor)


class AuditTrail:
    """The checks of one request, and the budget that follows from them.

    Args:
        rule: which steps are checked.
        first: position of the first generated token that selects.
        totals: of all requests; counts every check once more.
    """

    def __init__(self, rule: AuditRule, first: int, totals: AuditCounts) -> None:
        self.counts = AuditCounts()
        self._rule = rule
        self._first = first
        self._totals = totals
        self._factor = BudgetFactor()

    def turn(self, position: int) -> int | None:
        """Number of the audit of the token at a position; None for most."""
        return self._rule.turn(position - self._first) if position >= self._first else None

    def budget_factor(self, position: int) -> int:
        """The multiple of the request's budget for the token at a position."""
        return self._factor.at(position)

    def audited(self, position: int, *, missed_mass: float, missed_page: float, output_error: float) -> bool:
        """Takes in an audit; returns whether the exact output is to take the place of the other.

        One whose numbers are not finite counts for nothing: a request's NaN would stay in the sums of all.

        Args:
            position: of the token.
            missed_mass: as in ``AuditCounts``, of this audit; so are the others.
        """
        is_finite = all(map(math.isfinite, (missed_mass, missed_page, output_error)))
        if is_finite and not self._factor.is_judged(position):
            fails = missed_page > self._rule.largest_missed_page
            self._factor.judge(position, fails=fails)
            for counts in (self.counts, self._totals):
                counts.audits += 1
                counts.failed += fails
                counts.missed_mass += missed_mass
                counts.missed_page += missed_page
                counts.output_error += output_error
        return self._factor.has_failed(position)

"""When choices of pages are audited, and what audits found."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class AuditCounts:
    """What audits found.

    Attributes:
        audits: comparisons with exact attention, each in one layer.
        missed_mass: share of attention outside the pages that were read, mean over heads, summed over audits.
        missed_page: largest share of a head's attention on one page that was not read, summed over audits.
        output_error: of audited outputs, in lengths of the exact one, summed over audits.
    """

    audits: int = 0
    missed_mass: float = 0.0
    missed_page: float = 0.0
    output_error: float = 0.0


class AuditTrail:
    """The audits of one request.

    Args:
        interval: generated tokens from one audit to the next; 0 for none.
        first: position of the first generated token that selects.
        totals: of all requests; counts every audit once more.
    """

    def __init__(self, interval: int, first: int, totals: AuditCounts) -> None:
        self.counts = AuditCounts()
        self._interval = interval
        self._first = first
        self._totals = totals
        self._last = -1

    def turn(self, position: int) -> int | None:
        """Number of the audit of the token at a position; None for most."""
        step = position - self._first
        is_due = self._interval and step >= 0 and step % self._interval == 0
        return step // self._interval if is_due else None

    def audited(self, position: int, *, missed_mass: float, missed_page: float, output_error: float) -> None:
        """Counts an audit, once for each position: a retraction makes a request compute tokens again.

        One whose numbers are not finite counts for nothing: a request's NaN would stay in the sums of all.

        Args:
            position: of the token.
            missed_mass: as in ``AuditCounts``, of this audit; so are the others.
        """
        if position <= self._last or not all(map(math.isfinite, (missed_mass, missed_page, output_error))):
            return
        self._last = position
        for counts in (self.counts, self._totals):
            counts.audits += 1
            counts.missed_mass += missed_mass
            counts.missed_page += missed_page
            counts.output_error += output_error

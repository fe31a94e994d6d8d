"""The choice of pages of one request, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgl_importance.sparse.audits import AuditTrail
from sgl_importance.sparse.selection_rule import SelectionRule


@dataclass(slots=True, weakref_slot=True, eq=False)
class Selection:
    """Of one request.

    Attributes:
        rule: which tokens select, and how many pages.
        trail: checks of its choices.
        candidates: pages that its tokens chose from, in all layers.
        selected: those that were chosen.
    """

    rule: SelectionRule
    trail: AuditTrail
    candidates: int = 0
    selected: int = 0

    def report(self) -> dict[str, Any]:
        """The part ``pages`` of the report that a request may ask for; means are None where none was made."""
        counts = self.trail.counts

        def mean(total: float) -> float | None:
            return total / counts.audits if counts.audits else None

        return {
            "candidates": self.candidates,
            "selected": self.selected,
            "audits": counts.audits,
            "failed_audits": counts.failed,
            "missed_mass": mean(counts.missed_mass),
            "missed_page": mean(counts.missed_page),
            "output_error": mean(counts.output_error),
        }

"""What the tokens of recorded thoughts are, where somebody knows: milestones, and phases of the thought."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from sgl_importance.study.study_report import StudyError
from sgl_importance.study.thinking.wants import Bools, Counts, Wants

EXPLORE, VERIFY, CONCLUDE = "explore", "verify", "conclude"
PHASES = (EXPLORE, VERIFY, CONCLUDE)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens ``start`` to ``end`` (not included) of a sequence, prompt and answer, are of one phase."""

    phase: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Marks:
    """Of one request; positions count tokens of its sequence from 0, the prompt's included.

    Attributes:
        milestones: tokens that state what later steps need: a value, a push, a pop.
        phases: in order.
    """

    milestones: Sequence[int]
    phases: Sequence[Stretch]

    def milestone_pages(self, wants: Wants) -> Bools:
        """Columns that hold a milestone."""
        columns = np.zeros(wants.wanted.shape[2], np.bool_)
        pages = np.array(self.milestones, np.int64) // wants.page_size - wants.first_page
        columns[pages[(pages >= 0) & (pages < len(columns))]] = True
        return columns

    def steps_of(self, phase: str, first_position: int, num_steps: int) -> Counts:
        """Indices of the steps whose token is of a phase; the first step's is at ``first_position``."""
        inside = np.zeros(num_steps, np.bool_)
        for stretch in self.phases:
            if stretch.phase == phase:
                inside[max(0, stretch.start - first_position) : max(0, stretch.end - first_position)] = True
        return np.flatnonzero(inside)


def write_marks(path: Path, marks: Mapping[str, Marks]) -> None:
    """One line of JSON for each request id."""
    lines = [json.dumps({"rid": rid, **asdict(each)}) for rid, each in marks.items()]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_marks(path: Path) -> dict[str, Marks]:
    """Marks by request id.

    Raises:
        StudyError: a line is none of ``write_marks``.
    """
    found: dict[str, Marks] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            fields = json.loads(line)
            phases = [
                Stretch(str(each["phase"]), int(each["start"]), int(each["end"])) for each in fields["phases"]
            ]
            found[str(fields["rid"])] = Marks([int(at) for at in fields["milestones"]], phases)
        except (ValueError, TypeError, KeyError) as error:
            raise StudyError(
                f"line {number} of {path} says no marks of a request: it needs rid, milestones and phases "
                f"({type(error).__name__}: {error})"
            ) from error
    return found

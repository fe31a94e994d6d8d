"""What the tokens of recorded thoughts are, where somebody knows: milestones, and phases of the thought."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sgl_importance.json_text import read_json
from sgl_importance_lab.study.study_report import StudyError

Bools = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]

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
        margins: by how much the logit of the likeliest next token is above that of the second, of each
            generated token that was read, in order; none where nobody wrote them down.
    """

    milestones: Sequence[int]
    phases: Sequence[Stretch]
    margins: Sequence[float] = field(default_factory=list)

    def milestone_pages(self, page_size: int, first_page: int, num_columns: int) -> Bools:
        """Which columns hold a milestone; bool [columns]. Column 0 is page ``first_page`` of the sequence."""
        columns = np.zeros(num_columns, np.bool_)
        pages = np.array(self.milestones, np.int64) // page_size - first_page
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
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            fields = read_json(line)
            phases = [
                Stretch(str(each["phase"]), int(each["start"]), int(each["end"])) for each in fields["phases"]
            ]
            margins = [float(margin) for margin in fields.get("margins", [])]
            milestones = np.array([int(at) for at in fields["milestones"]], np.int64).tolist()
            found[str(fields["rid"])] = Marks(milestones, phases, margins)
        except (ValueError, OverflowError, TypeError, KeyError) as error:
            raise StudyError(
                f"line {number} of {path} says no marks of a request: it needs rid, milestones and phases "
                f"({type(error).__name__}: {error})"
            ) from error
    return found

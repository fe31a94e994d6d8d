"""Which tokens of a right thought are milestones, and the phases of its steps."""

from __future__ import annotations

import pytest

from sgl_importance_lab.reasoner.milestones import milestones, phases
from sgl_importance_lab.reasoner.tasks import TASKS, make_task, read_prompt
from sgl_importance_lab.study.thinking.marks import PHASES

SEARCH = "Graph : ADA Carl Bella . CARL . BELLA . Question : Ada to Bella path ?"
PROGRAM = "Program : Ada 3 . Carl 5 . Sums : BELLA Ada Carl . Order : BELLA . Question : Bella ?"


def test_pushes_and_pops_are_milestones() -> None:
    thought = read_prompt(SEARCH).solve().thought
    said = [thought.pieces[at].strip() for at in milestones(thought)]
    assert said == ["Ada", "none", "Carl", "Ada", "Ada", "none", "Bella", "Ada"]
    spoken = [(phase, "".join(thought.pieces[start:end]).split()[0]) for phase, start, end in phases(thought)]
    assert spoken == [
        ("explore", "visit"),
        ("explore", "visit"),
        ("verify", "back"),
        ("explore", "visit"),
        ("conclude", "goal"),
        ("conclude", "path"),
    ]


def test_a_value_is_a_milestone_where_it_is_stated_first() -> None:
    thought = read_prompt(PROGRAM).solve().thought
    assert [thought.pieces[at].strip() for at in milestones(thought)] == ["Bella", "8"]
    assert [phase for phase, _, _ in phases(thought)] == ["explore", "conclude"]


@pytest.mark.parametrize("task", TASKS)
def test_phases_cover_a_thought(task: str) -> None:
    thought = make_task(task, 256, 0).solution.thought
    found = list(phases(thought))
    assert {phase for phase, _, _ in found} <= set(PHASES)
    assert [0, *(end for _, _, end in found)] == [*(start for _, start, _ in found), len(thought.pieces)]
    assert all(0 <= at < len(thought.pieces) for at in milestones(thought))

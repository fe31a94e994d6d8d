"""The rule that learns which pages a thought will want, and what it is judged by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance_lab.replay.residency.page_steps import PageRecording
from sgl_importance_lab.study.study_report import StudyError
from sgl_importance_lab.study.thinking.keep_rules import KEEP_RULES
from sgl_importance_lab.study.thinking.learned_rule import fit_rule
from sgl_importance_lab.study.thinking.marks import Marks
from sgl_importance_lab.study.thinking.measured import Kinds, Measured, measure_recordings
from sgl_importance_lab.study.thinking.page_features import PAGE_FEATURES, page_features
from sgl_importance_lab.study.thinking.page_loads import study_residency
from sgl_importance_lab.study.thinking.rule_run import run_rule
from sgl_importance_lab.study.thinking.wants import Wants, read_wants

from support.workloads.page_recordings import looks_back, recorded
from support.workloads.recordings import PAGE_SIZE
from support.workloads.wants import random_wants, wants_of

pytest.importorskip("torch")


def in_turns(number: int, steps: int = 60) -> Wants:
    """Each page is wanted every 20 steps: what was wanted just now will not be wanted soon."""
    rows = [[(step + number) % 20] for step in range(steps)]
    return wants_of(rows, [24] * steps)


def test_a_learned_rule_foresees_what_comes_in_turns() -> None:
    learned = fit_rule([in_turns(0), in_turns(7)])
    (ours,) = run_rule(in_turns(3), learned, [0.5])
    (lru,) = run_rule(in_turns(3), KEEP_RULES["LRU"], [0.5])
    assert ours.misses[0, 0] < 0.8 * lru.misses[0, 0]
    assert (
        learned.named_weights()["steps since it was wanted"] > 0
        or learned.named_weights()["steps since it was wanted, squared"] > 0
    )


@given(random_wants(), st.data())
def test_features_see_nothing_of_the_future(wants: Wants, data: st.DataObject) -> None:
    known = data.draw(st.integers(1, wants.num_steps))
    before = list(page_features(wants.steps(np.arange(known))))
    for one, other in zip(before, page_features(wants), strict=False):
        np.testing.assert_array_equal(one[:, : wants.num_pages[0]], other[:, : wants.num_pages[0]])


def test_features_know_milestones_and_how_sure_the_model_was(tmp_path: Path) -> None:
    recording = recorded(tmp_path, [looks_back("thought", 0, 2)])
    rid = recording.requests[0].rid
    marks = {rid: Marks([2 * PAGE_SIZE], [], margins=[0.5, 7.0])}
    (wants,) = read_wants(recording, 0.1, 32, marks)
    table = list(page_features(wants))
    milestone = PAGE_FEATURES.index("a milestone")
    assert np.flatnonzero(table[0][0, :, milestone]).tolist() == [2]
    margin = PAGE_FEATURES.index("logit of the next token above the second")
    assert [float(each[0, 0, margin]) for each in table[:3]] == [0.5, 7.0, 0.0]
    (unmarked,) = read_wants(recording, 0.1, 32)
    assert not list(page_features(unmarked))[1][..., [milestone, margin]].any()


def measured_thoughts(recording: PageRecording) -> list[Measured]:
    return measure_recordings([recording], {}, Kinds("thought", "thought"))


def test_the_residency_finding_judges_by_thoughts_that_it_did_not_see(tmp_path: Path) -> None:
    recording = recorded(tmp_path, [looks_back("thought", number, 3) for number in range(6)])
    found = study_residency([recording], measured_thoughts(recording), {}, PAGE_SIZE, "thought", None)
    shares = {(row["rule"], row["scope"]): row for row in found.rows if row["kept"] == 0.2}
    assert {row["thoughts"] for row in found.rows} == {3}
    assert shares["oracle", "context"]["loaded"] <= shares["learned", "context"]["loaded"]
    assert shares[shares["LRU", "context"]["best"], "context"]["fewer than best"] == 0
    assert found.value.value == pytest.approx(shares["learned", "context"]["fewer than best"])


def test_a_rule_cannot_learn_from_one_thought(tmp_path: Path) -> None:
    recording = recorded(tmp_path, [looks_back("thought", number, 3) for number in range(2)])
    with pytest.raises(StudyError, match="needs four or more"):
        study_residency([recording], measured_thoughts(recording), {}, PAGE_SIZE, "thought", None)

"""The reasoner's curriculum: each skill climbs by its own right replies, and state is all that it needs."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
from reasoner_training.curriculum import SKILLS, Curriculum, Plan, full_plan, smoke_plan

from sgl_importance_lab.probe.word_tokenizer import END
from sgl_importance_lab.reasoner.tokenizer import THINK, reasoner_tokenizer


def test_a_skill_goes_on_when_its_own_replies_are_right() -> None:
    curriculum = Curriculum(full_plan(), seed=0)
    assert not any(curriculum.advance("program", 0, 0.4) for _ in range(100))
    assert not any(curriculum.advance("program", 1, 1.0) for _ in range(100)), "of another length"
    assert any(curriculum.advance("program", 0, 1.0) for _ in range(100))
    assert curriculum.level == {"program": 1, "search": 0}
    assert curriculum.right["program"] == 0.0


def test_the_longest_length_is_the_last() -> None:
    curriculum = Curriculum(Plan((48, 64), target=-1.0), seed=0)
    assert curriculum.advance("search", 0, 1.0)
    assert not any(curriculum.advance("search", 1, 1.0) for _ in range(10))


def test_the_learning_rate_falls_and_ends_the_run() -> None:
    curriculum = Curriculum(full_plan(), seed=0, step=500)
    assert curriculum.learning_rate() == curriculum.plan.learning_rate
    curriculum.begin_fall(50)
    rates = []
    while not curriculum.finished:
        rates.append(curriculum.learning_rate())
        curriculum.advance("search", 0, 0.0)
    assert len(rates) == 50
    assert all(high > low for high, low in pairwise(rates))
    assert rates[-1] < 0.05 * rates[0]


@pytest.mark.parametrize("thinks", [True, False])
def test_batch_depends_on_seed_and_state_alone(thinks: bool) -> None:
    curriculum = Curriculum(smoke_plan(thinks), seed=3)
    for _ in range(4):
        skill, level, sequences = curriculum.batch()
        restored = Curriculum(smoke_plan(thinks), seed=3)
        restored.restore(copy.deepcopy(curriculum.state()))
        assert restored.batch() == (skill, level, sequences)
        assert Curriculum(smoke_plan(thinks), seed=4).batch()[2] != sequences
        curriculum.advance(skill, level, 1.0)


@pytest.mark.parametrize("thinks", [True, False])
def test_sequences_end_with_the_reply_and_fit_the_step(thinks: bool) -> None:
    ids = reasoner_tokenizer().ids
    curriculum = Curriculum(full_plan(thinks=thinks), seed=0)
    for _ in range(20):
        skill, level, sequences = curriculum.batch()
        assert skill in SKILLS
        longest = max(len(sequence.ids) for sequence in sequences)
        assert len(sequences) == 1 or longest * len(sequences) <= curriculum.plan.tokens_per_step
        for sequence in sequences:
            assert sequence.ids[-1] == ids[END]
            assert (sequence.ids[sequence.reply_start] == ids[THINK]) == thinks
            assert all(low < high for low, high in pairwise(sequence.positions))
            assert sequence.positions[: sequence.reply_start] == list(range(sequence.reply_start))
        curriculum.advance(skill, level, 1.0)

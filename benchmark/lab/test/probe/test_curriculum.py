"""The curriculum: stages end by accuracy, the learning rate falls, and its state is all that it needs."""

from __future__ import annotations

import copy

from probe_training.curriculum import Curriculum, full_plan, smoke_plan


def _finish_stages(curriculum: Curriculum) -> None:
    for stage in curriculum.plan.stages:
        while not curriculum.advance(stage.main_task, 1.0):
            pass


def test_plan_copies_first_and_doubles_the_context() -> None:
    stages = full_plan(longest=1024).stages
    assert stages[0].main_task == stages[1].main_task == "copy"
    assert [stage.context for stage in stages] == [64, 64, 64, 128, 256, 512, 1024]


def test_stage_ends_only_when_its_own_task_is_learnt() -> None:
    curriculum = Curriculum(full_plan(), seed=0)
    assert not any(curriculum.advance("chat", 1.0) for _ in range(100))
    assert not any(curriculum.advance("copy", 0.9) for _ in range(100))
    assert any(curriculum.advance("copy", 1.0) for _ in range(100))
    assert curriculum.stage_index == 1
    assert curriculum.accuracy == {}


def test_polish_ends_the_run_while_the_learning_rate_falls() -> None:
    curriculum = Curriculum(full_plan(polish_steps=50), seed=0)
    _finish_stages(curriculum)
    assert curriculum.polishing
    assert curriculum.progress == 0.5
    rates = []
    while not curriculum.finished:
        rates.append(curriculum.learning_rate())
        curriculum.advance("chat", 1.0)
    assert len(rates) == 50
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < rates[0] / 20
    assert curriculum.progress == 1.0


def test_batch_depends_on_seed_and_state_alone() -> None:
    curriculum = Curriculum(smoke_plan(), seed=3)
    for _ in range(3):
        task, sequences = curriculum.batch()
        restored = Curriculum(smoke_plan(), seed=3)
        restored.restore(copy.deepcopy(curriculum.state()))
        assert restored.batch() == (task, sequences)
        assert Curriculum(smoke_plan(), seed=4).batch()[1] != sequences
        curriculum.advance(task, 1.0)

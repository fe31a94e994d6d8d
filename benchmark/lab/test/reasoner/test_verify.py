"""The verifier: right thoughts pass, and the first wrong step of any other is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance_lab.reasoner.tasks import TASKS, make_task
from sgl_importance_lab.reasoner.verify import verify

tasks = st.sampled_from(TASKS)
seeds = st.integers(0, 10**6)


@given(task=tasks, length=st.integers(32, 300), seed=seeds, data=st.data())
def test_the_first_wrong_step_is_the_one_that_was_changed(
    task: str, length: int, seed: int, data: st.DataObject
) -> None:
    instance = make_task(task, length, seed)
    thought = instance.solution.thought
    assert verify(instance.prompt, thought.text).first_wrong is None

    changed = data.draw(st.integers(0, len(thought.pieces) - 1))
    words = thought.text.split()
    words[changed] = "wrong"
    verdict = verify(instance.prompt, " ".join(words))
    number = sum(start <= changed for start in thought.step_starts) - 1
    assert verdict.first_wrong is not None
    assert verdict.first_wrong.number == verdict.right_steps == number
    assert verdict.first_wrong.kind == thought.steps[number].kind
    assert "wrong" in verdict.first_wrong.got
    assert verdict.share_right == number / len(thought.steps)


@pytest.mark.parametrize("task", TASKS)
def test_a_thought_that_ends_early_or_late(task: str) -> None:
    instance = make_task(task, 100, 0)
    steps = instance.solution.thought.steps
    words = instance.thought.split()

    nothing = verify(instance.prompt, "")
    assert nothing.right_steps == 0
    assert nothing.first_wrong is not None
    assert nothing.first_wrong.got == ""

    early = verify(instance.prompt, " ".join(words[:-1]))
    assert early.right_steps == len(steps) - 1

    late = verify(instance.prompt, " ".join([*words, "again"]))
    assert late.right_steps == late.steps == len(steps)
    assert late.first_wrong is not None
    assert late.first_wrong.kind == "end of thought"


def test_a_wrong_step_reads_as_a_sentence() -> None:
    prompt = "Program : Ada 3 . Sums : BELLA Ada Ada . Order : BELLA . Question : Bella ?"
    wrong = verify(prompt, "BELLA Ada 3 Ada 3 Bella 7 BELLA answer Bella 7").first_wrong
    got, expected = "BELLA Ada 3 Ada 3 Bella 7 BELLA", "BELLA Ada 3 Ada 3 Bella 6 BELLA"
    assert str(wrong) == f"step 0 (line) is '{got}', not '{expected}'"

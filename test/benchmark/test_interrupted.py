"""How thoughts that were interrupted, or read a part of their context, are compared with others."""

from __future__ import annotations

import pytest

from benchmark.sparse.interrupted import Interrupted
from benchmark.sparse.thought_budgets import same_before
from benchmark.sparse.written_thoughts import thoughts_of
from sgl_importance_lab.reasoner.tokenizer import reasoner_tokenizer


def interrupted(alone: list[int], written: list[int], start: int = 0) -> Interrupted:
    return Interrupted(thoughts_of(128, 1)[0], alone, written, start)


@pytest.mark.parametrize(
    ("written", "start", "agreement"),
    [
        ([1, 2, 3, 4], 0, 1.0),
        ([1, 2, 3, 4], 2, 1.0),
        ([1, 2, 9, 4], 0, 0.75),
        ([1, 2, 9, 4], 2, 0.5),
        ([1, 2, 3], 2, 0.5),  # it ended too early
        ([1, 2, 3, 4, 5], 2, 1.0),  # and too late
        ([1, 2], 2, 0.0),
    ],
)
def test_agreement_is_of_the_tokens_behind_the_interruption(
    written: list[int], start: int, agreement: float
) -> None:
    found = interrupted([1, 2, 3, 4], written, start)
    assert found.agreement == agreement
    assert found.is_same == (written == [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("written", "share"),
    [([1, 2, 3, 4], 1.0), ([1, 9, 3, 4], 0.25), ([1, 2], 0.5), ([9], 0.0), ([1, 2, 3, 4, 5], 1.0)],
)
def test_what_is_the_same_ends_with_the_first_token_that_differs(written: list[int], share: float) -> None:
    assert same_before(written, [1, 2, 3, 4]) == share


def test_a_thought_is_right_by_its_final_answer() -> None:
    """Instances of both tasks; with the mark that ends it, and without its answer."""
    tokenizer = reasoner_tokenizer()
    for thought in thoughts_of(128, 2):
        reply = tokenizer.encode(thought.task.reply)
        assert thought.is_right(reply)
        assert thought.is_right([*reply, tokenizer.ids["<|end|>"]])
        assert not thought.is_right(reply[: len(reply) // 2])
        assert len(reply) < thought.limit

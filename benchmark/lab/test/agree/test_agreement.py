"""What is made of two answers, beside sums done by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance_lab.agree.agreement import Step, agreement, kl, summary
from sgl_importance_lab.agree.forced_answer import LEAD, without_lead

LOGPROBS = st.dictionaries(st.sampled_from("abcdef"), st.floats(-20, 0), min_size=1)


def step(token: str, **shares: float) -> Step:
    return Step(token, {name: math.log(share) for name, share in shares.items()})


@given(LOGPROBS, LOGPROBS)
def test_divergence_is_never_negative_and_that_from_itself_is_none(
    first: dict[str, float], second: dict[str, float]
) -> None:
    assert kl(first, second) >= -1e-12
    assert kl(first, first) == pytest.approx(0, abs=1e-12)


@given(LOGPROBS, LOGPROBS, st.floats(-50, 50))
def test_a_constant_in_the_logprobs_changes_nothing(
    first: dict[str, float], second: dict[str, float], constant: float
) -> None:
    moved = {token: value + constant for token, value in second.items()}
    assert kl(first, moved) == pytest.approx(kl(first, second), abs=1e-9)


def test_divergence_by_hand() -> None:
    first, second = step("a", a=0.75, b=0.25), step("a", a=0.5, b=0.5)
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert kl(first.logprobs, second.logprobs) == pytest.approx(expected)


def test_a_forced_answer_is_compared_to_its_end() -> None:
    own = [step("a", a=0.9, b=0.1), step("a", a=0.9, b=0.1), step("b", a=0.1, b=0.9)]
    forced = [step("a", a=0.9, b=0.1), step("a", a=0.2, b=0.8), step("b", a=0.1, b=0.9)]
    found = agreement(1, own, forced)
    assert (found.compared, found.equal, found.first_difference) == (3, 2, 1)


def test_a_free_answer_is_compared_up_to_its_first_difference() -> None:
    own = [step("a", a=0.9, b=0.1), step("a", a=0.9, b=0.1), step("b", a=0.1, b=0.9)]
    free = [step("a", a=0.9, b=0.1), step("b", a=0.2, b=0.8), step("b", a=0.1, b=0.9)]
    found = agreement(1, own, free)
    assert (found.compared, found.equal, found.first_difference) == (2, 1, 1)


def test_an_answer_that_ends_earlier_differs() -> None:
    own = [step("a", a=0.9, b=0.1)] * 2
    assert agreement(1, own, own[:1]).first_difference == 1
    assert agreement(1, own, own).first_difference is None


def test_the_lead_of_a_forced_token_is_taken_back() -> None:
    wanted = {"a": -0.2, "b": -2.0}
    reported = {"a": -0.2 - LEAD, "b": -2.0}  # as if b was forced: only differences count
    raised = {"a": reported["a"], "b": wanted["b"] - LEAD + LEAD}
    found = without_lead(raised, "b")
    assert found["a"] - found["b"] == pytest.approx(wanted["a"] - wanted["b"])


def test_intervals_are_over_prompts() -> None:
    rows = [agreement(n, [step("a", a=0.9, b=0.1)], [step("a", a=0.9, b=0.1)]) for n in range(5)]
    found = summary(rows)
    assert found["equal tokens"].value == 1
    assert found["equal tokens"].n == 5
    assert found["prompts without a difference"].value == 1

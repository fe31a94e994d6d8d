"""Which token ids are refused, and where a refusal says that they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_importance.http.token_limits import UnknownToken, check_token_ids, unknown_token

SIZE = 100
ids = st.lists(st.integers(-SIZE, 2 * SIZE), min_size=1)


@given(ids)
def test_a_prompt_passes_exactly_if_all_its_ids_are_known(prompt: list[int]):
    assert (unknown_token(prompt, SIZE) is None) == all(0 <= token < SIZE for token in prompt)


@given(st.lists(ids, min_size=1))
def test_of_a_batch_the_first_wrong_prompt_is_named(batch: list[list[int]]):
    wrong = [index for index, prompt in enumerate(batch) if unknown_token(prompt, SIZE)]
    if not wrong:
        check_token_ids("prompt", batch, SIZE)
        return
    with pytest.raises(UnknownToken, match=f"^prompt.{wrong[0]}: token id "):
        check_token_ids("prompt", batch, SIZE)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([99, 100], "input_ids: token id 100 is beyond the model's vocabulary of 100"),
        ([0, -1], "input_ids: token id -1 is beyond the model's vocabulary of 100"),
        ([[1], [2, 10**12]], "input_ids.1: token id 1000000000000 is beyond the model's vocabulary of 100"),
        (([1], (100,)), "input_ids.1: token id 100 is beyond the model's vocabulary of 100"),
    ],
)
def test_what_is_said(given: object, message: str):
    with pytest.raises(UnknownToken) as refused:
        check_token_ids("input_ids", given, SIZE)
    assert str(refused.value) == message


def nested(depth: int) -> list[object]:
    inner: list[object] = []
    for _ in range(depth):
        inner = [inner, inner]
    return inner


@pytest.mark.parametrize(
    "given",
    [None, [], [[]], "text", ["text"], 7, {"a": 1}, [None], [1, "a"], [[1], 5], [1, [500]], nested(2000)],
)
def test_what_holds_no_ids_is_left_to_sglang(given: object):
    check_token_ids("input_ids", given, SIZE)

"""Which token ids are refused, and where a refusal says that they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_importance.http.requests.token_limits import (
    BadTokens,
    check_stop_tokens,
    check_token_ids,
    unknown_token,
)

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
    with pytest.raises(BadTokens, match=f"^prompt.{wrong[0]}: token id "):
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
    with pytest.raises(BadTokens) as refused:
        check_token_ids("input_ids", given, SIZE)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("given", "place"), [([[]], 0), ([[], [100]], 0), ([[1], []], 1), ([(), [1]], 0), (((1,), ()), 1)]
)
def test_a_prompt_without_tokens_is_refused_in_a_batch(given: object, place: int):
    with pytest.raises(BadTokens, match=f"^input_ids.{place}: a prompt without tokens$"):
        check_token_ids("input_ids", given, SIZE)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_token_ids": [5, 100]}, "sampling_params.stop_token_ids: token id 100 is beyond"),
        ({"stop_token_ids": ["-5", None]}, "sampling_params.stop_token_ids: token id -5 is beyond"),
        ({"stop_token_ids": {1e9}}, "sampling_params.stop_token_ids: token id 1000000000 is beyond"),
    ],
)
def test_stop_tokens_are_looked_at_where_sglang_masks_them(params: dict, message: str):
    with pytest.raises(BadTokens, match=message):
        check_stop_tokens({**params, "min_new_tokens": 2}, SIZE)
    with pytest.raises(BadTokens, match=message.replace("params", "params.1")):
        check_stop_tokens([{}, {**params, "min_new_tokens": 2}], SIZE)
    check_stop_tokens({**params, "min_new_tokens": 0}, SIZE)
    check_stop_tokens(params, SIZE)


@pytest.mark.parametrize("value", [None, [], [5, 99, "7", None], 7, ["x"], [[1]], [float("inf")], {"a": 1}])
def test_other_stop_tokens_are_left_to_sglang(value: object):
    check_stop_tokens({"stop_token_ids": value, "min_new_tokens": 2}, SIZE)
    check_stop_tokens(value, SIZE)


def nested(depth: int) -> list[object]:
    inner: list[object] = []
    for _ in range(depth):
        inner = [inner, inner]
    return inner


@pytest.mark.parametrize(
    "given",
    [None, [], "text", ["text"], 7, {"a": 1}, [None], [1, "a"], [[1], 5], [1, [500]], [1, []], nested(2000)],
)
def test_what_holds_no_ids_is_left_to_sglang(given: object):
    check_token_ids("input_ids", given, SIZE)

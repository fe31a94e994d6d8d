"""Two prompts that part and join again, by construction."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.observe.volatile.detector import GRAM, HASHES, sketch
from sgl_importance.observe.volatile.parting import MAX_FIELD, MIN_RUN, common_prefix, parting, token_ids


def distinct(count: int, start: int) -> list[int]:
    return list(range(start, start + count))


@given(
    lead=st.integers(0, 1500),
    fields=st.tuples(st.integers(0, MAX_FIELD), st.integers(0, MAX_FIELD)).filter(any),
    run=st.integers(MAX_FIELD + 16, 2500),
    tails=st.tuples(st.integers(0, 100), st.integers(0, 100)),
)
@settings(deadline=None)
def test_field_and_run_are_those_that_were_put_there(lead, fields, run, tails):
    front, body = distinct(lead, 0), distinct(run, 10_000)
    one, other = (
        token_ids([*front, *distinct(field, base), *body, *distinct(tail, base + 5000)], 1 << 16)
        for field, tail, base in zip(fields, tails, (20_000, 30_000), strict=True)
    )
    found = parting(one, other)
    assert found == (lead, lead + fields[0], lead + fields[1], lead + fields[0] + run)
    assert found.run == run


@pytest.mark.parametrize(
    ("field", "run"), [(3, MIN_RUN - 1), (MAX_FIELD + 1, 2000)], ids=["short run", "long field"]
)
def test_what_is_no_field_in_front_of_a_run_is_none(field: int, run: int):
    one, other = (
        token_ids([*distinct(field, base), *distinct(run, 10_000), *distinct(900, base + 3000)], 1 << 16)
        for base in (20_000, 30_000)
    )
    assert parting(one, other) is None


def test_a_prompt_that_only_goes_on_does_not_part():
    ids = token_ids(distinct(500, 0), 1 << 16)
    assert parting(ids, ids[:300]) is None
    assert parting(ids[:300], ids) is None


@given(st.lists(st.integers(0, 3), max_size=3000), st.lists(st.integers(0, 3), max_size=3000))
def test_the_common_prefix_is_the_naive_one(first, second):
    naive = 0
    while naive < min(len(first), len(second)) and first[naive] == second[naive]:
        naive += 1
    assert common_prefix(token_ids(first, 1 << 16), token_ids(second, 1 << 16)) == naive


@given(st.lists(st.integers(0, 200_000), max_size=300), st.integers(0, 400))
def test_ids_are_the_same_from_a_list_and_from_an_array(tokens, limit):
    from_array = token_ids(array("q", tokens), limit)
    assert from_array.tolist() == tokens[:limit] == token_ids(tokens, limit).tolist()
    assert from_array.dtype == np.int32


def test_a_sketch_outlives_a_field_anywhere_and_tells_other_texts_apart():
    generator = random.Random(3)
    text = [generator.randrange(30_000) for _ in range(600)]
    for place in (0, 100, 400):
        changed = [*text[:place], 77_000, 77_001, *text[place:]]
        shared = {*sketch(token_ids(text, 1 << 16))} & {*sketch(token_ids(changed, 1 << 16))}
        assert len(shared) >= HASHES // 2
    other = [generator.randrange(30_000) for _ in range(600)]
    assert not {*sketch(token_ids(text, 1 << 16))} & {*sketch(token_ids(other, 1 << 16))}
    assert sketch(token_ids(text[: GRAM - 1], 1 << 16)) == []
    assert len(sketch(token_ids(text[:GRAM], 1 << 16))) == 1

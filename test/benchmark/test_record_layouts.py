"""Records planted in a window of text: they stand in it once each, and where their layout says."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark.sparse.real.layouts import LAYOUTS, MENTIONS, RECORDS_IN, Planted, Text, inserted

PAGE, RECORDS, NUMBER_AT = 16, 6, 6
FILLER = 0
PLANTED = [
    Planted([at] * NUMBER_AT + [100 + at] * 5, NUMBER_AT, [200 + at] * 8) for at in range(1, RECORDS + 1)
]


def laid_out(layout: str, size: int, line: int, seed: int) -> tuple[list[int], list[bool]]:
    text = Text([FILLER] * (12 * size), range(line, 12 * size, line), size, PAGE)
    return inserted(text, LAYOUTS[layout](text, PLANTED, random.Random(seed)))


@given(
    st.sampled_from(sorted(LAYOUTS)),
    st.integers(64, 256).map(lambda n: n * PAGE),
    st.integers(3, 40),
    st.integers(),
)
def test_every_record_stands_in_the_window_once(layout: str, size: int, line: int, seed: int) -> None:
    tokens, is_planted = laid_out(layout, size, line, seed)
    window = tokens[:size]
    for each in PLANTED:
        (begin,) = [at for at in range(size) if window[at] == each.record[0] and window[at - 1] != window[at]]
        assert window[begin : begin + len(each.record)] == list(each.record)
    assert [token != FILLER for token in tokens] == is_planted


@given(st.integers(64, 256).map(lambda n: n * PAGE), st.integers(3, 40), st.integers())
def test_split_numbers_begin_a_page(size: int, line: int, seed: int) -> None:
    tokens, _ = laid_out("split", size, line, seed)
    for each in PLANTED:
        number = tokens.index(each.record[-1])
        assert number % PAGE == 0
        assert number // PAGE > tokens.index(each.record[0]) // PAGE


@pytest.mark.parametrize("seed", range(5))
def test_crowded_records_stand_together_and_decoys_apart(seed: int) -> None:
    size = 2048
    tokens, is_planted = laid_out("crowded", size, 11, seed)
    first = is_planted.index(True)
    assert all(is_planted[first : first + sum(len(each.record) for each in PLANTED)])
    tokens, _ = laid_out("decoys", size, 11, seed)
    for each in PLANTED:
        mentions = tokens.count(each.mention[0]) // len(each.mention)
        assert mentions == MENTIONS
    assert max(at for at in range(size * 2) if tokens[at] != FILLER) < size
    assert RECORDS_IN < 1

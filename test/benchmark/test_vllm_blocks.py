"""What benchmark/peers believes that vLLM finds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark.peers.vllm_blocks import VllmBlocks

BLOCK = 4
TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5 * BLOCK), min_size=1, max_size=8)


def names(text: list[int]) -> list[object]:
    """Of the whole blocks."""
    return [tuple(text[:end]) for end in range(BLOCK, len(text) + 1, BLOCK)]


def text(first: int, blocks: int) -> list[int]:
    return [first] * (blocks * BLOCK + 1)


@given(TEXTS)
def test_with_room_for_all_a_prompt_finds_its_longest_beginning_but_for_its_last_token(
    texts: list[list[int]],
) -> None:
    blocks, seen = VllmBlocks(200, BLOCK), set[object]()
    for each in texts:
        found = 0
        for name in names(each[:-1]):
            if name not in seen:
                break
            found += BLOCK
        assert blocks.computed(names(each), len(each), 2) == len(each) - found
        seen.update(names(each))


@given(TEXTS, st.integers(6, 12))
def test_blocks_are_neither_lost_nor_made(texts: list[list[int]], count: int) -> None:
    blocks = VllmBlocks(count, BLOCK)
    for each in texts:
        blocks.computed(names(each), len(each), 2)
        assert set(blocks._waiting) == set(range(count))
        named = [block for twins in blocks._named.values() for block in twins]
        assert sorted(named) == [block for block, name in enumerate(blocks._names) if name is not None]


def test_the_end_of_a_text_goes_before_its_beginning() -> None:
    blocks = VllmBlocks(6, BLOCK)
    assert blocks.computed(names(text(1, 4)), 17, 1) == 17
    # One block waits unnamed from the start, one was not full; one more has to go.
    assert blocks.computed(names(text(2, 2)), 9, 1) == 9
    assert blocks.computed(names(text(1, 4)), 17, 1) == 17 - 3 * BLOCK


def test_what_is_not_a_full_block_goes_before_older_ones() -> None:
    blocks = VllmBlocks(6, BLOCK)
    blocks.computed(names(text(1, 2)), 9, 1)
    blocks.computed(names(text(2, 2)), 9, 1)
    blocks.computed(names(text(3, 1)), 5, 1)  # in the two that have no name
    assert blocks.computed(names(text(1, 2)), 9, 1) == 1


def test_an_answer_that_goes_on_is_found() -> None:
    blocks = VllmBlocks(20, BLOCK)
    longer = text(1, 4)
    blocks.computed(names(longer), 2 * BLOCK, 2 * BLOCK + 2)
    assert blocks.computed(names(longer), len(longer), 1) == 1


def test_a_request_that_is_longer_than_the_device_says_so() -> None:
    with pytest.raises(ValueError, match="longer than the device"):
        VllmBlocks(2, BLOCK).computed(names(text(1, 4)), 17, 1)

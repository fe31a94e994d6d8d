"""What is known of a page's reads, and who leaves by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance_kernels.sparse.page_history import DECAY, PageHistory, Residency
from sgl_importance_kernels.sparse.page_slots import PageSlots

PAGE = 4
reads = st.lists(st.sets(st.integers(0, 5), max_size=4), min_size=1, max_size=12)


@given(reads)
def test_worth_is_what_the_choices_say(passes: list[set[int]]) -> None:
    """Page p is chosen for a share of p / 10. In pass 2 all pages are streamed, too."""
    now = len(passes) - 1

    def summed(of_choice: Callable[[int, int], float]) -> list[float]:
        return [
            sum(of_choice(page, at) for at, some in enumerate(passes) if page in some) for page in range(6)
        ]

    streamed = [2] if now >= 2 else []
    chosen_in = [[at for at, some in enumerate(passes) if page in some] for page in range(6)]
    expected = {
        "lru": [max(at + streamed, default=-2) for at in chosen_in],
        # Ages 0, 1, 2 to 3, 4 to 7 and so on are alike.
        "bucketed_lru": [-(now - max(at + streamed, default=-2)).bit_length() for at in chosen_in],
        "lfu": summed(lambda page, at: 1),
        "ema": summed(lambda page, at: DECAY ** (now - at)),
        "importance": summed(lambda page, at: page / 10 * DECAY ** (now - at)),
    }
    for policy in get_args(Residency):
        history = PageHistory(policy, 2, 6, "cpu")
        for at, some in enumerate(passes):
            pages = torch.tensor(sorted(some), dtype=torch.int64)
            history.read(1, pages, at, pages / 10)
            if at == 2:
                history.read(1, torch.arange(6), at, None)
        worth = history.worth(1, torch.arange(6), now).float()
        torch.testing.assert_close(worth, torch.tensor(expected[policy], dtype=torch.float32))
        history.forget(torch.tensor([3]))
        unread = {"lru": -2, "bucketed_lru": -(now + 2).bit_length()}
        assert history.worth(1, torch.tensor([3]), now).item() == unread.get(policy, 0)


def test_a_share_that_is_no_number_leaves_a_page_worth_what_it_was() -> None:
    history = PageHistory("importance", 1, 2, "cpu")
    pages = torch.tensor([0, 1])
    history.read(0, pages, 0, torch.tensor([0.5, 0.5]))
    history.read(0, pages, 1, torch.tensor([torch.nan, 0.0]))
    worth = history.worth(0, pages, 1)
    assert worth[0] == worth[1] == 0.5 * DECAY


def slots_with(policy: str, num_slots: int) -> PageSlots:
    host = [[torch.arange(20.0 * PAGE)[:, None, None].clone()] for _ in range(2)]
    return PageSlots(
        *host,
        num_frames=1,
        num_slots=num_slots + 1,
        page_size=PAGE,
        staging_pages=8,
        device="cpu",
        residency=policy,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("policy", "leaves"), [("lru", 1), ("bucketed_lru", 1), ("lfu", 3), ("ema", 3), ("importance", 2)]
)
def test_who_leaves(policy: str, leaves: int) -> None:
    """Page 1 is chosen most often, page 3 last, page 2 for the least attention; then page 4 comes."""
    slots = slots_with(policy, 3)
    attention = {1: 0.1, 2: 0.05, 3: 0.2, 4: 0.1}
    for page in (1, 1, 1, 2, 2, 3, 4):
        slots.begin_pass(torch.tensor([], dtype=torch.int64))
        assert 0 < int(slots.place(0, torch.tensor([page]), torch.tensor([attention[page]]))) <= 3
        slots.check_integrity()
    found = slots.is_resident(0, torch.arange(20)).nonzero().flatten().tolist()
    assert set(found) == {1, 2, 3, 4} - {leaves}


def test_a_stream_leaves_chosen_pages_where_they_are() -> None:
    slots = slots_with("ema", 2)
    slots.begin_pass(torch.tensor([], dtype=torch.int64))
    slots.place(0, torch.tensor([1, 2]), torch.ones(2))
    for _ in range(2):
        slots.begin_pass(torch.tensor([], dtype=torch.int64))
        slots.place(0, torch.tensor([1, 2]), torch.ones(2))
        slots.place(0, torch.tensor([7, 8, 9]))
        assert slots.is_resident(0, torch.tensor([1, 2, 7])).tolist() == [True, True, False]


def test_pages_of_one_step_do_not_push_each_other_out() -> None:
    slots = slots_with("lru", 3)
    slots.begin_pass(torch.tensor([], dtype=torch.int64))
    for pages in ([1, 2, 3], [4, 5, 6]):  # two requests of a batch
        slots.place(0, torch.tensor(pages), torch.ones(3))
    assert slots.is_resident(0, torch.arange(1, 7)).tolist() == [True] * 3 + [False] * 3

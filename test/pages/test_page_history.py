"""What is known of a page's reads, and who leaves by it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.options import RESIDENCY_POLICIES
from sgl_importance_kernels.pages.page_history import DECAY, PageHistory
from sgl_importance_kernels.pages.page_slots import PageSlots

PAGE = 4
reads = st.lists(st.sets(st.integers(0, 5), max_size=4), min_size=1, max_size=12)


@given(reads)
def test_worth_is_what_the_reads_say(passes: list[set[int]]) -> None:
    now = len(passes) - 1
    expected = {
        "lru": [
            max((at for at, pages in enumerate(passes) if page in pages), default=-2) for page in range(6)
        ],
        "lfu": [sum(page in pages for pages in passes) for page in range(6)],
        "ema": [
            sum(DECAY ** (now - at) for at, pages in enumerate(passes) if page in pages) for page in range(6)
        ],
    }
    for policy in RESIDENCY_POLICIES:
        history = PageHistory(policy, 2, 6, "cpu")
        for at, pages in enumerate(passes):
            for _ in range(2):  # as by two requests of a batch
                history.read(1, torch.tensor(sorted(pages), dtype=torch.int64), at)
        worth = history.worth(1, torch.arange(6), now).float()
        torch.testing.assert_close(worth, torch.tensor(expected[policy], dtype=torch.float32))
        history.forget(torch.tensor([3]))
        assert history.worth(1, torch.tensor([3]), now).item() == {"lru": -2}.get(policy, 0)


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


@pytest.mark.parametrize(("policy", "resident"), [("lru", {4, 5}), ("lfu", {1, 2}), ("ema", {1, 2})])
def test_who_leaves(policy: str, resident: set[int]) -> None:
    """Pages 1 and 2 are read in every step but the last, which reads two others."""
    slots = slots_with(policy, 2)
    for pages in ([1, 2], [1, 2], [1, 2], [4, 5]):
        slots.begin_pass(torch.tensor([], dtype=torch.int64))
        places = slots.place(0, torch.tensor(pages), is_chosen=True)
        assert len(places) == len(pages)
        slots.check_integrity()
    found = slots.is_resident(0, torch.arange(20)).nonzero().flatten().tolist()
    assert set(found) == resident


def test_a_stream_leaves_chosen_pages_where_they_are() -> None:
    slots = slots_with("ema", 2)
    slots.begin_pass(torch.tensor([], dtype=torch.int64))
    slots.place(0, torch.tensor([1, 2]), is_chosen=True)
    for _ in range(2):
        slots.begin_pass(torch.tensor([], dtype=torch.int64))
        slots.place(0, torch.tensor([1, 2]), is_chosen=True)
        slots.place(0, torch.tensor([7, 8, 9]), is_chosen=False)
        assert slots.is_resident(0, torch.tensor([1, 2, 7])).tolist() == [True, True, False]


def test_pages_of_one_step_do_not_push_each_other_out() -> None:
    slots = slots_with("lru", 3)
    slots.begin_pass(torch.tensor([], dtype=torch.int64))
    for pages in ([1, 2, 3], [4, 5, 6]):  # two requests of a batch
        slots.place(0, torch.tensor(pages), is_chosen=True)
    assert slots.is_resident(0, torch.arange(1, 7)).tolist() == [True] * 3 + [False] * 3

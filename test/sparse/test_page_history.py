"""What is known of a page's reads, and who leaves by it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance_kernels.sparse.page_history import DECAY, NEVER, PageHistory
from sgl_importance_kernels.sparse.page_slots import PageSlots

PAGE = 4
reads = st.lists(st.sets(st.integers(0, 5), max_size=4), min_size=1, max_size=12)


@given(reads)
def test_reads_and_choices_are_remembered_until_a_page_is_freed(passes: list[set[int]]) -> None:
    """In pass 2 all pages are streamed, too, which is no choice."""
    now = len(passes) - 1
    streamed = [2] if now >= 2 else []
    chosen_in = [[at for at, some in enumerate(passes) if page in some] for page in range(6)]
    choices = [sum(DECAY ** (now - at) for at in of_page) for of_page in chosen_in]
    history = PageHistory(2, 6, "cpu")
    for at, some in enumerate(passes):
        pages = torch.tensor(sorted(some), dtype=torch.int64)
        history.read(1, pages, at, is_chosen=True)
        if at == 2:
            history.read(1, torch.arange(6), at, is_chosen=False)
    assert history.last_read(1, torch.arange(6)).tolist() == [
        max(at + streamed, default=NEVER) for at in chosen_in
    ]
    torch.testing.assert_close(history.choices(torch.arange(6), now), torch.tensor([[0.0] * 6, choices]))
    history.forget(torch.tensor([3]))
    assert history.last_read(1, torch.tensor([3])).item() == NEVER
    assert history.choices(torch.tensor([3]), now).tolist() == [[0.0], [0.0]]


def slots_with(num_slots: int) -> PageSlots:
    host = [[torch.arange(20.0 * PAGE)[:, None, None].clone()] for _ in range(2)]
    return PageSlots(
        *host,
        num_frames=1,
        num_slots=num_slots + 1,
        page_size=PAGE,
        staging_pages=8,
        device="cpu",
    )


def test_the_page_that_was_read_first_leaves() -> None:
    """Page 1 is chosen most often, page 3 last; then page 4 comes."""
    slots = slots_with(3)
    for page in (1, 1, 1, 2, 2, 3, 4):
        slots.begin_pass(torch.tensor([], dtype=torch.int64))
        assert 0 < int(slots.place(0, torch.tensor([page]), is_chosen=True)) <= 3
        slots.check_integrity()
    found = slots.is_resident(0, torch.arange(20)).nonzero().flatten().tolist()
    assert set(found) == {2, 3, 4}


def test_a_stream_leaves_chosen_pages_where_they_are() -> None:
    slots = slots_with(2)
    slots.begin_pass(torch.tensor([], dtype=torch.int64))
    slots.place(0, torch.tensor([1, 2]), is_chosen=True)
    for _ in range(2):
        slots.begin_pass(torch.tensor([], dtype=torch.int64))
        slots.place(0, torch.tensor([1, 2]), is_chosen=True)
        slots.place(0, torch.tensor([7, 8, 9]))
        assert slots.is_resident(0, torch.tensor([1, 2, 7])).tolist() == [True, True, False]


def test_pages_of_one_step_do_not_push_each_other_out() -> None:
    slots = slots_with(3)
    slots.begin_pass(torch.tensor([], dtype=torch.int64))
    for pages in ([1, 2, 3], [4, 5, 6]):  # two requests of a batch
        slots.place(0, torch.tensor(pages), is_chosen=True)
    assert slots.is_resident(0, torch.arange(1, 7)).tolist() == [True] * 3 + [False] * 3

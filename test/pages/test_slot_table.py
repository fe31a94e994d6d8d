"""Slots that are given to the pages of a whole step at once, beside those given request by request."""

from __future__ import annotations

from typing import get_args

import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance_kernels.pages.page_history import PageHistory, Residency
from sgl_importance_kernels.pages.slot_table import SlotTable

PAGES, SLOTS, FRAMES = 20, 9, 2

policies = st.sampled_from(get_args(Residency))
request = st.lists(st.integers(1, PAGES - 1), min_size=1, max_size=5, unique=True)
steps = st.lists(st.lists(request, min_size=1, max_size=3), min_size=1, max_size=8)


def empty(policy: Residency) -> SlotTable:
    return SlotTable(PageHistory(policy, 1, PAGES, "cpu"), 1, PAGES, SLOTS, FRAMES, "cpu")


def given_step(table: SlotTable, requests: list[list[int]]) -> tuple[torch.Tensor, ...]:
    """One step, padded; all of a request's pages have the same share."""
    longest = max(map(len, requests))
    pages = torch.tensor([[*each, *[-1] * (longest - len(each))] for each in requests]).flatten()
    shares = torch.full((len(pages),), 0.25)
    return pages, *table.give_step(0, pages, shares, torch.full_like(pages, -1))


@given(policies, steps)
def test_a_step_keeps_its_promises(policy: Residency, all_steps: list[list[list[int]]]) -> None:
    table = empty(policy)
    for requests in all_steps:
        table.begin_pass()
        before = table.slot_of[0].clone()
        pages, slots, brought, to_slots = given_step(table, requests)
        table.check_integrity()
        wanted = {page for each in requests for page in each}
        loads = {int(page): int(slot) for page, slot in zip(brought, to_slots, strict=True) if page >= 0}
        assert loads.keys() == {page for page in wanted if before[page] < 0 <= table.slot_of[0, page]}
        assert all(slot == table.slot_of[0, page] for page, slot in loads.items())
        assert len(set(loads.values())) == len(loads)
        assert bool(((brought < 0) == (to_slots < 0)).all())
        for page, slot in zip(pages.tolist(), slots.tolist(), strict=True):
            assert slot == (int(table.slot_of[0, page]) if page >= 0 else -1)
        # What was there and is read stays; a page goes without a slot only where all are taken by such.
        assert all(table.slot_of[0, page] == before[page] for page in wanted if before[page] >= 0)
        resident = [int(page) for page in table.page_in[0] if page >= 0]
        if any(table.slot_of[0, page] < 0 for page in wanted):
            assert len(resident) == SLOTS - FRAMES
            assert set(resident) <= wanted


@given(policies, st.lists(request, min_size=1, max_size=10))
def test_one_request_gets_the_slots_that_it_would_get_alone(
    policy: Residency, reads: list[list[int]]
) -> None:
    together, alone = empty(policy), empty(policy)
    for each in reads:
        for table in (together, alone):
            table.begin_pass()
        given_step(together, [each])
        pages = torch.tensor(each)
        slots = alone.read(0, pages, torch.full((len(each),), 0.25), most_missing=PAGES)
        alone.give(0, pages[slots < 0].sort().values, is_chosen=True)
        assert torch.equal(together.slot_of, alone.slot_of)
        assert torch.equal(together.page_in, alone.page_in)
        everything = torch.arange(1, PAGES)
        torch.testing.assert_close(together.choices(everything), alone.choices(everything))


def test_pages_in_frames_need_no_slot() -> None:
    table = empty("ema")
    table.begin_pass()
    pages = torch.tensor([3, 4, -1])
    slots, brought, _ = table.give_step(0, pages, torch.zeros(3), torch.tensor([1, -1, -1]))
    assert slots.tolist() == [1, int(table.slot_of[0, 4]), -1]
    assert [page for page in brought.tolist() if page >= 0] == [4]
    assert int(table.slot_of[0, 3]) == -1

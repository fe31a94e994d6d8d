"""Slots that are given to the pages of a whole step at once."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance_kernels.sparse.page_history import PageHistory
from sgl_importance_kernels.sparse.slot_table import SlotTable

PAGES, SLOTS, FRAMES = 20, 9, 2

request = st.lists(st.integers(1, PAGES - 1), min_size=1, max_size=5, unique=True)
steps = st.lists(st.lists(request, min_size=1, max_size=3), min_size=1, max_size=8)


def empty() -> SlotTable:
    return SlotTable(PageHistory(1, PAGES, "cpu"), 1, PAGES, SLOTS, FRAMES, "cpu")


def given_step(table: SlotTable, requests: list[list[int]]) -> tuple[torch.Tensor, ...]:
    """One step, padded."""
    longest = max(map(len, requests))
    pages = torch.tensor([[*each, *[-1] * (longest - len(each))] for each in requests]).flatten()
    return pages, *table.read(0, pages, torch.full_like(pages, -1), is_chosen=True)


@given(steps)
def test_a_step_keeps_its_promises(all_steps: list[list[list[int]]]) -> None:
    table = empty()
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


@given(st.lists(request, min_size=1, max_size=10), st.data())
def test_whoever_stands_first_in_the_batch_changes_nothing(
    reads: list[list[int]], data: st.DataObject
) -> None:
    in_order, shuffled = empty(), empty()
    for each in reads:
        for table in (in_order, shuffled):
            table.begin_pass()
        given_step(in_order, [each])
        given_step(shuffled, [[page] for page in data.draw(st.permutations(each))])
        assert torch.equal(shuffled.slot_of, in_order.slot_of)
        assert torch.equal(shuffled.page_in, in_order.page_in)


@given(st.lists(request, min_size=1, max_size=8))
def test_pages_of_whole_contexts_push_out_no_page_of_the_last_two_passes(contexts: list[list[int]]) -> None:
    table = empty()
    last_read: dict[int, int] = {}
    for now, pages in enumerate(contexts):
        table.begin_pass()
        before = {int(page) for page in table.page_in[0] if page >= 0}
        numbers = torch.tensor(pages)
        slots, brought, _ = table.read(0, numbers, torch.full_like(numbers, -1), is_chosen=False)
        last_read |= dict.fromkeys(pages, now)
        left = before - {int(page) for page in table.page_in[0]}
        assert all(last_read[page] < now - 1 for page in left)
        came = {int(page) for page in brought if page >= 0}
        assert came == {page for page, slot in zip(pages, slots, strict=True) if slot >= 0} - before
        if bool((slots < 0).any()):  # some page got none: nobody could make room for it
            held = {int(page) for page in table.page_in[0] if page >= 0}
            assert len(held) == SLOTS - FRAMES
            assert all(last_read[page] >= now - 1 for page in held)
        table.check_integrity()


def plainly_given(table: SlotTable, missing: list[int], *, is_chosen: bool) -> dict[int, int]:
    """Slots of the missing pages by the rule: free ones, then those least recently read, first of equals."""
    slots = range(FRAMES, SLOTS)
    held = {slot: int(table.page_in[0, slot]) for slot in slots}
    numbers = torch.arange(PAGES)
    last = table.history.last_read(0, numbers).tolist()
    free = [slot for slot in slots if held[slot] < 0]
    bound = table.now if is_chosen else table.now - 1
    going = [slot for slot in slots if held[slot] >= 0 and last[held[slot]] < bound]
    going.sort(key=lambda slot: last[held[slot]])
    return dict(zip(sorted(missing), [*free, *going], strict=False))


@given(st.lists(st.tuples(request, st.booleans()), min_size=1, max_size=12))
def test_slots_go_to_pages_as_a_plain_reference_gives_them(reads: list[tuple[list[int], bool]]) -> None:
    table = empty()
    for pages, is_chosen in reads:
        table.begin_pass()
        numbers = torch.tensor(pages)
        table.history.read(0, numbers, table.now, is_chosen=is_chosen)
        missing = [page for page in pages if table.slot_of[0, page] < 0]
        expected = plainly_given(table, missing, is_chosen=is_chosen)
        absent = torch.tensor(sorted(missing), dtype=torch.int64)
        brought, to_slots = table.give(0, absent, is_chosen=is_chosen)
        found = zip(brought.tolist(), to_slots.tolist(), strict=True)
        assert {page: slot for page, slot in found if page >= 0} == expected
        table.check_integrity()


@given(st.lists(request, min_size=1, max_size=6), request)
def test_pages_leave_their_slots_without_a_wait_as_with_one(reads: list[list[int]], freed: list[int]) -> None:
    waiting, asynchronous = empty(), empty()
    for each in reads:
        for table in (waiting, asynchronous):
            table.begin_pass()
            given_step(table, [each])
    waiting.free(torch.tensor(freed))
    staying = next(page for page in range(1, PAGES) if page not in freed)
    pages = torch.tensor([*freed, -1, staying, -1])  # -1 stands for padding
    asynchronous.free_where(pages, torch.tensor([*[True] * len(freed), False, False, False]))
    assert torch.equal(waiting.slot_of, asynchronous.slot_of)
    assert torch.equal(waiting.page_in, asynchronous.page_in)


def test_pages_in_frames_need_no_slot() -> None:
    table = empty()
    table.begin_pass()
    pages = torch.tensor([3, 4, -1])
    slots, brought, _ = table.read(0, pages, torch.tensor([1, -1, -1]), is_chosen=True)
    assert slots.tolist() == [1, int(table.slot_of[0, 4]), -1]
    assert [page for page in brought.tolist() if page >= 0] == [4]
    assert int(table.slot_of[0, 3]) == -1


def test_padding_gets_no_slot() -> None:
    table = empty()
    table.begin_pass()
    pages = torch.tensor([0, 5, 0])
    slots, brought, _ = table.read(0, pages, torch.full_like(pages, -1), is_chosen=False)
    table.check_integrity()
    assert slots.tolist() == [-1, int(table.slot_of[0, 5]), -1]
    assert [page for page in brought.tolist() if page >= 0] == [5]

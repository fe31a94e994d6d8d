"""The allocation kernels of the CPU against an allocator that takes one token at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_importance.cpu.allocator import alloc_decode, alloc_extend

PAGE_SIZES = (1, 2, 16, 64)
SPARE_PAGES = 3


def last_slot(pages: list[int], length: int, page_size: int) -> int:
    """Slot of a request's last token; -1 before its first, as the scheduler writes it."""
    return pages[(length - 1) // page_size] * page_size + (length - 1) % page_size if length else -1


def next_slots(last: int, start: int, end: int, free: Iterator[int], page_size: int) -> list[int]:
    """Slots of tokens ``start`` to ``end``: behind the last one, or at the start of the next free page."""
    slots = []
    for position in range(start, end):
        last = next(free) * page_size if position % page_size == 0 else last + 1
        slots.append(last)
    return slots


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]], list[int]]:
    """(page size, (cached, new, last slot) of each request, free pages in random order)."""
    page_size = draw(st.sampled_from(PAGE_SIZES))
    requests = draw(st.lists(st.tuples(st.integers(0, 130), st.integers(1, 200)), min_size=1, max_size=5))
    needed = [-(-(cached + new) // page_size) for cached, new in requests]
    pages = draw(st.permutations(range(1, sum(needed) + SPARE_PAGES + 1)))
    taken = iter(pages)
    batch = []
    for cached, new in requests:
        held = [next(taken) for _ in range(-(-cached // page_size))]
        batch.append((cached, new, last_slot(held, cached, page_size)))
    return page_size, batch, list(taken)


@settings(deadline=None)  # the first example imports sglang
@given(batches())
def test_extend_fills_the_open_page_then_takes_free_ones(
    batch: tuple[int, list[tuple[int, int, int]], list[int]],
) -> None:
    page_size, requests, free_pages = batch
    cached, new, last = (torch.tensor(column) for column in zip(*requests, strict=True))
    out = torch.full((int(new.sum()),), -7)
    alloc_extend(cached, cached + new, last, torch.tensor(free_pages), out, 8, page_size)

    free = iter(free_pages)
    expected = [
        slot
        for prefix, length, slot_before in requests
        for slot in next_slots(slot_before, prefix, prefix + length, free, page_size)
    ]
    assert out.tolist() == expected


@settings(deadline=None)
@given(batches())
def test_decode_takes_one_slot_each(batch: tuple[int, list[tuple[int, int, int]], list[int]]) -> None:
    page_size, requests, free_pages = batch
    requests = [request for request in requests if request[0]]
    lengths = torch.tensor([cached + 1 for cached, _, _ in requests], dtype=torch.int64)
    last = torch.tensor([slot for _, _, slot in requests], dtype=torch.int64)
    out = torch.full((len(requests),), -7)
    alloc_decode(lengths, last, torch.tensor(free_pages), out, 8, page_size)

    free = iter(free_pages)
    expected = [
        slot
        for cached, _, slot_before in requests
        for slot in next_slots(slot_before, cached, cached + 1, free, page_size)
    ]
    assert out.tolist() == expected


def test_decode_survives_a_pool_that_is_too_short() -> None:
    """The allocator asks first and counts pages afterwards: no exception, whatever the slots."""
    out = torch.empty(2, dtype=torch.int64)
    alloc_decode(torch.tensor([17, 33]), torch.tensor([31, 63]), torch.tensor([5]), out, 2, 16)
    assert out[0] == 5 * 16

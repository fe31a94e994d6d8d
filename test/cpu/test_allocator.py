"""The paged allocator on the CPU, through upstream's own class."""

from __future__ import annotations

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.allocator import paged

from sglang_importance.cpu.allocator import PagedAllocatorKernels

PAGE_SIZE = 16


def lengths(*values: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As the class takes them: on the device and on the host, which are one here."""
    return torch.tensor(values), torch.tensor(values)


@pytest.fixture
def allocator() -> paged.PagedTokenToKVPoolAllocator:
    """Pages 1, 2 and 3; page 0 is upstream's padding."""
    return paged.PagedTokenToKVPoolAllocator(
        3 * PAGE_SIZE, PAGE_SIZE, torch.float32, "cpu", kvcache=None, need_sort=True
    )


def test_a_batch_shares_the_pages_out(allocator: paged.PagedTokenToKVPoolAllocator) -> None:
    slots = allocator.alloc_extend(*lengths(0, 0), *lengths(20, 3), torch.tensor([-1, -1]), 23)
    assert slots.tolist() == [*range(16, 36), *range(48, 51)]
    assert allocator.available_size() == 0
    # Both still fill the page that they have begun, in a pool without a free one.
    assert allocator.alloc_decode(*lengths(21, 4), torch.tensor([35, 50])).tolist() == [36, 51]
    more = allocator.alloc_extend(*lengths(21, 4), *lengths(23, 9), torch.tensor([36, 51]), 7)
    assert more.tolist() == [37, 38, *range(52, 57)]


def test_a_full_pool_says_so(allocator: paged.PagedTokenToKVPoolAllocator) -> None:
    assert allocator.alloc_extend(*lengths(0), *lengths(49), torch.tensor([-1]), 49) is None
    assert allocator.available_size() == 3 * PAGE_SIZE
    assert allocator.alloc_extend(*lengths(0), *lengths(48), torch.tensor([-1]), 48) is not None
    assert allocator.alloc_decode(*lengths(49), torch.tensor([63])) is None


class Sequences:
    """Slots of requests that grow together, and what must be true of them."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages = pages
        self.allocator = paged.PagedTokenToKVPoolAllocator(
            pages * page_size, page_size, torch.float32, "cpu", kvcache=None, need_sort=True
        )
        self.slots: list[list[int]] = [[], [], []]

    def grow(self, *tokens: int) -> bool:
        """Adds so many tokens to each request; False where the pool is too full."""
        before = lengths(*map(len, self.slots))
        after = lengths(*(len(slots) + new for slots, new in zip(self.slots, tokens, strict=True)))
        last = torch.tensor([slots[-1] if slots else -1 for slots in self.slots])
        if set(tokens) == {1} and all(self.slots):
            out = self.allocator.alloc_decode(*after, last)
        else:
            out = self.allocator.alloc_extend(*before, *after, last, sum(tokens))
        if out is None:
            return False
        self.slots = [old + new.tolist() for old, new in zip(self.slots, out.split(tokens), strict=True)]
        return True

    def check_integrity(self) -> None:
        page_size = self.allocator.page_size
        pages = []
        for slots in self.slots:
            own = [slot // page_size for slot in slots[::page_size]]
            assert slots == [own[i // page_size] * page_size + i % page_size for i in range(len(slots))], (
                "a token is not at its offset in its request's page"
            )
            pages += own
        assert len(set(pages)) == len(pages), "two requests share a page"
        assert 0 not in pages, "page 0 is upstream's padding"
        assert self.allocator.available_size() == (self.pages - len(pages)) * page_size


@settings(deadline=None)
@given(
    page_size=st.sampled_from([2, 16, 64]),
    steps=st.lists(st.just((1, 1, 1)) | st.tuples(*[st.integers(1, 80)] * 3), max_size=12),
)
def test_every_token_gets_its_own_slot_at_its_offset(
    page_size: int, steps: list[tuple[int, int, int]]
) -> None:
    sequences = Sequences(2 + 256 // page_size, page_size)
    for step in steps:
        room = sequences.grow(*step)
        sequences.check_integrity()
        if not room:
            break


def test_the_shim_is_for_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not PagedAllocatorKernels().needed()  # ours are in place

    def kernel() -> None: ...

    monkeypatch.setattr(paged, "alloc_extend_kernel", triton.JITFunction(kernel))
    assert PagedAllocatorKernels().needed()

"""The paged allocator on the CPU, through upstream's own class."""

from __future__ import annotations

import pytest
import torch
import triton
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


def test_the_shim_is_for_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not PagedAllocatorKernels().needed()  # ours are in place

    def kernel() -> None: ...

    monkeypatch.setattr(paged, "alloc_extend_kernel", triton.JITFunction(kernel))
    assert PagedAllocatorKernels().needed()

"""The paged allocator without Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_importance.cpu.shim import Shim


class _Launchable:
    """A function that is called like a Triton kernel: ``kernel[grid](...)``."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._function


def alloc_extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    _batch_size_upper: int,
    page_size: int,
) -> None:
    """Slots of an extend, by upstream's own reference in torch."""
    from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

    if not len(free_pages):  # the reference looks at a page even where none is needed
        free_pages = free_pages.new_zeros(1)
    alloc_extend_naive(
        prefix_lens, seq_lens, last_loc, free_pages, out_indices, page_size, out_indices.device
    )


def alloc_decode(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    _batch_size_upper: int,
    page_size: int,
) -> None:
    """One slot per request: the one behind its last, or the first of a fresh page, in batch order."""
    needs_page = (seq_lens - 1) % page_size == 0
    out_indices.copy_(last_loc + 1)
    fresh = free_pages[: int(needs_page.sum())]
    out_indices[needs_page.nonzero().flatten()[: len(fresh)]] = fresh * page_size


class PagedAllocatorKernels(Shim):
    defect = "page_size > 1 allocates with Triton: '0 active drivers' (mem_cache/allocator/paged.py:206, 247)"

    _KERNELS = ("alloc_extend_kernel", "alloc_decode_kernel")

    def needed(self) -> bool:
        from sglang.srt.mem_cache.allocator import paged
        from triton.runtime import JITFunction

        kernels = (getattr(paged, name, None) for name in self._KERNELS)
        return any(isinstance(kernel, JITFunction) for kernel in kernels)

    def apply(self) -> None:
        from sglang.srt.mem_cache.allocator import paged

        paged.alloc_extend_kernel = _Launchable(alloc_extend)
        paged.alloc_decode_kernel = _Launchable(alloc_decode)

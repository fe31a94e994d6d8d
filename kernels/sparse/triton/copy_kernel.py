"""Copies pages between the tiers; either side may be host memory that is mapped for the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_NUMBERS = 1024


@triton.jit(do_not_specialize=["page_numbers"])
def _copy_kernel(Source, SourcePages, Target, TargetPages, page_numbers, BLOCK: tl.constexpr):
    index = tl.program_id(0)
    source = tl.load(SourcePages + index)
    target = tl.load(TargetPages + index)
    if (source < 0) | (target < 0):
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = at < page_numbers
    numbers = tl.load(Source + source * page_numbers + at, mask=within)
    tl.store(Target + target * page_numbers + at, numbers, mask=within)


def copy_pages(
    source: torch.Tensor, source_pages: torch.Tensor, target: torch.Tensor, target_pages: torch.Tensor
) -> None:
    """Copies pages, asynchronously. The host's side must be pinned where the other is on a CUDA device.

    Args:
        source: [pages, page size, KV heads, dimension], contiguous.
        source_pages: which of them, int64 [copies]; -1 for a copy that is left out.
        target: likewise; of the same page shape.
        target_pages: where they go, int64 [copies], -1 as above; none twice.
    """
    assert source.shape[1:] == target.shape[1:], (source.shape, target.shape)
    assert source.dtype == target.dtype, (source.dtype, target.dtype)
    assert source.is_contiguous()
    assert target.is_contiguous()
    page_numbers = source[0].numel()
    if len(source_pages):
        _copy_kernel[(len(source_pages), triton.cdiv(page_numbers, BLOCK_NUMBERS))](
            source, source_pages, target, target_pages, page_numbers, BLOCK=BLOCK_NUMBERS
        )

"""Copies pages between the tiers; either side may be host memory that is mapped for the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_NUMBERS = 1024
MOST_PROGRAMS = 512
"""Of pages that were brought: how many there are, only the device knows, so each program copies several."""


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


@triton.jit(do_not_specialize=["key_numbers", "value_numbers"])
def _bring_kernel(
    HostKeys,
    HostValues,
    SlotKeys,
    SlotValues,
    Brought,
    Slots,
    Count,
    key_numbers,
    value_numbers,
    BLOCK: tl.constexpr,
):
    key_blocks = (key_numbers + BLOCK - 1) // BLOCK
    blocks = key_blocks + (value_numbers + BLOCK - 1) // BLOCK
    tasks = tl.load(Count).to(tl.int32) * blocks
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        page = tl.load(Brought + task // blocks).to(tl.int64)
        slot = tl.load(Slots + task // blocks).to(tl.int64)
        block = task % blocks
        if block < key_blocks:
            at = block * BLOCK + tl.arange(0, BLOCK)
            numbers = tl.load(HostKeys + page * key_numbers + at, mask=at < key_numbers)
            tl.store(SlotKeys + slot * key_numbers + at, numbers, mask=at < key_numbers)
        else:
            at = (block - key_blocks) * BLOCK + tl.arange(0, BLOCK)
            numbers = tl.load(HostValues + page * value_numbers + at, mask=at < value_numbers)
            tl.store(SlotValues + slot * value_numbers + at, numbers, mask=at < value_numbers)


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


def bring_pages(
    host: tuple[torch.Tensor, torch.Tensor],
    slots: tuple[torch.Tensor, torch.Tensor],
    brought: torch.Tensor,
    slots_given: torch.Tensor,
    count: torch.Tensor,
) -> None:
    """Copies keys and values of pages into slots, in one launch; asynchronous.

    Args:
        host: keys and values of all pages of a layer, [pages, page size, KV heads, dimension] each; pinned
            where slots are on a CUDA device.
        slots: likewise, by slot.
        brought: pages, int32 [at least count].
        slots_given: where each goes, int32 likewise.
        count: how many are copied, int64 [1] on the device.
    """
    assert all(buffer.is_contiguous() for buffer in (*host, *slots))
    key_numbers, value_numbers = host[0][0].numel(), host[1][0].numel()
    blocks = sum(triton.cdiv(numbers, BLOCK_NUMBERS) for numbers in (key_numbers, value_numbers))
    if len(brought):
        _bring_kernel[(min(MOST_PROGRAMS, len(brought) * blocks),)](
            *host, *slots, brought, slots_given, count, key_numbers, value_numbers, BLOCK=BLOCK_NUMBERS
        )

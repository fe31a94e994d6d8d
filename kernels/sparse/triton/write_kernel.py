"""Writes new tokens of a decode step to the page that each request fills, and complete pages to the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_importance_kernels.sparse.triton.copy_kernel import BLOCK_NUMBERS


@triton.jit
def _write(
    New, Slots, Host, row, page, offset, frame, is_reopened, token_numbers, at, PAGE_SIZE: tl.constexpr
):
    completes = (offset == PAGE_SIZE - 1).to(tl.int64)
    page_numbers = token_numbers * PAGE_SIZE
    start = offset * token_numbers
    stop = start + token_numbers
    is_new = (at >= start) & (at < stop)
    # Numbers before the token's: those of a reopened page come from the host, and all go there with its last.
    from_host = at < start * is_reopened
    from_frame = at < start * completes * (1 - is_reopened)
    new = tl.load(New + row * token_numbers + at - start, mask=is_new)
    of_host = tl.load(Host + page * page_numbers + at, mask=from_host)
    in_frame = tl.load(Slots + frame * page_numbers + at, mask=from_frame)
    numbers = tl.where(is_new, new, tl.where(from_host, of_host, in_frame))
    tl.store(Slots + frame * page_numbers + at, numbers, mask=is_new | from_host)
    tl.store(Host + page * page_numbers + at, numbers, mask=at < stop * completes)


@triton.jit(do_not_specialize=["key_numbers", "value_numbers"])
def _write_kernel(
    NewKeys,
    NewValues,
    SlotKeys,
    SlotValues,
    HostKeys,
    HostValues,
    Pages,
    Offsets,
    Frames,
    IsReopened,
    key_numbers,
    value_numbers,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    page = tl.load(Pages + row)
    if page < 0:
        return
    offset = tl.load(Offsets + row)
    frame = tl.load(Frames + row)
    reopened = tl.load(IsReopened + row).to(tl.int64)
    block = tl.program_id(1)
    key_blocks = (key_numbers * PAGE_SIZE + BLOCK - 1) // BLOCK
    if block < key_blocks:
        at = block * BLOCK + tl.arange(0, BLOCK)
        _write(NewKeys, SlotKeys, HostKeys, row, page, offset, frame, reopened, key_numbers, at, PAGE_SIZE)
    else:
        at = (block - key_blocks) * BLOCK + tl.arange(0, BLOCK)
        _write(
            NewValues,
            SlotValues,
            HostValues,
            row,
            page,
            offset,
            frame,
            reopened,
            value_numbers,
            at,
            PAGE_SIZE,
        )


def write_tokens(
    new: tuple[torch.Tensor, torch.Tensor],
    slots: tuple[torch.Tensor, torch.Tensor],
    host: tuple[torch.Tensor, torch.Tensor],
    pages: torch.Tensor,
    offsets: torch.Tensor,
    frames: torch.Tensor,
    is_reopened: torch.Tensor,
) -> None:
    """Writes keys and values of one token a row; asynchronous. The host's side must be pinned where the
    other is on a GPU.

    Args:
        new: keys and values, [rows, KV heads, dimension] each, contiguous.
        slots: likewise, [slots, page size, KV heads, dimension].
        host: likewise, [pages, page size, KV heads, dimension].
        pages: of each row, int64 [rows]; -1 for one that is left out.
        offsets: of the token in its page, int64 [rows]. At the last one the page goes to the host.
        frames: slots of the pages, int64 [rows].
        is_reopened: whether the page's tokens before this one come from the host, bool [rows].
    """
    for buffers in zip(new, slots, host, strict=True):
        assert len({buffer.dtype for buffer in buffers}) == 1, [buffer.dtype for buffer in buffers]
        assert all(buffer.is_contiguous() for buffer in buffers)
    if len(pages):
        blocks = sum(triton.cdiv(buffer[0].numel(), BLOCK_NUMBERS) for buffer in slots)
        _write_kernel[(len(pages), blocks)](
            *new,
            *slots,
            *host,
            pages,
            offsets,
            frames,
            is_reopened,
            *(part[0].numel() for part in new),
            PAGE_SIZE=slots[0].shape[1],
            BLOCK=BLOCK_NUMBERS,
        )

"""Writes new tokens of a decode step to the page that each request fills, and complete pages to the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_importance_kernels.sparse.triton.copy_kernel import BLOCK_NUMBERS


@triton.jit(do_not_specialize=["token_numbers"])
def _write_kernel(
    New,
    Slots,
    Host,
    Pages,
    Offsets,
    Frames,
    IsReopened,
    token_numbers,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    page = tl.load(Pages + row)
    if page < 0:
        return
    offset = tl.load(Offsets + row)
    frame = tl.load(Frames + row)
    is_reopened = tl.load(IsReopened + row).to(tl.int64)
    completes = (offset == PAGE_SIZE - 1).to(tl.int64)
    page_numbers = token_numbers * PAGE_SIZE
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
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


def write_tokens(
    new: torch.Tensor,
    slots: torch.Tensor,
    host: torch.Tensor,
    pages: torch.Tensor,
    offsets: torch.Tensor,
    frames: torch.Tensor,
    is_reopened: torch.Tensor,
) -> None:
    """Writes one token a row; asynchronous. The host's side must be pinned where the other is on a GPU.

    Args:
        new: [rows, KV heads, dimension], contiguous.
        slots: [slots, page size, KV heads, dimension], contiguous.
        host: [pages, page size, KV heads, dimension], contiguous.
        pages: of each row, int64 [rows]; -1 for one that is left out.
        offsets: of the token in its page, int64 [rows]. At the last one the page goes to the host.
        frames: slots of the pages, int64 [rows].
        is_reopened: whether the page's tokens before this one come from the host, bool [rows].
    """
    assert new.dtype == slots.dtype == host.dtype, (new.dtype, slots.dtype, host.dtype)
    assert all(buffer.is_contiguous() for buffer in (new, slots, host))
    if len(pages):
        _write_kernel[(len(pages), triton.cdiv(slots[0].numel(), BLOCK_NUMBERS))](
            new,
            slots,
            host,
            pages,
            offsets,
            frames,
            is_reopened,
            new[0].numel(),
            PAGE_SIZE=slots.shape[1],
            BLOCK=BLOCK_NUMBERS,
        )

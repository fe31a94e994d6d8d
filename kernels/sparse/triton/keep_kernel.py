"""Means and codes of complete pages, of one layer or of all, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_importance_kernels.sparse.bit_tables import (
    FACTORS_PER_DOUBLING,
    HEADER_BYTES,
    LARGEST,
    MOST_BITS,
    BitTables,
)

_LARGEST = tl.constexpr(LARGEST)
_MOST_BITS = tl.constexpr(MOST_BITS)
_HEADER_BYTES = tl.constexpr(HEADER_BYTES)
_FACTORS = tl.constexpr(FACTORS_PER_DOUBLING)


@triton.jit(do_not_specialize=["num_rows", "num_pages", "first_layer"])
def _keep_kernel(
    Keys,
    Rows,
    Pages,
    Kept,
    Offsets,
    Sizes,
    Units,
    IsBuilt,
    Widths,
    Starts,
    Steps,
    Channels,
    Usual,
    num_rows,
    num_pages,
    first_layer,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    page = tl.load(Pages + tl.program_id(0))
    head = tl.program_id(1)
    layer = first_layer + tl.program_id(2).to(tl.int64)
    of_head = layer * KV_HEADS + head
    token, dim = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    is_dim = dim < HEAD_DIM
    is_key = (token < PAGE_SIZE)[:, None] & is_dim[None, :]
    row = tl.program_id(2).to(tl.int64) * num_rows + tl.load(Rows + tl.program_id(0))
    of_row = ((row * PAGE_SIZE + token[:, None]) * KV_HEADS + head) * HEAD_DIM + dim[None, :]
    keys = tl.load(Keys + of_row, mask=is_key, other=0.0).to(tl.float32)

    mean = tl.sum(keys, axis=0) / PAGE_SIZE
    unit = tl.maximum(tl.max(tl.abs(mean), axis=0), 1.1754944e-38) / _LARGEST
    means = tl.floor(mean / unit + 0.5)
    width = tl.load(Widths + of_head * HEAD_DIM + dim, mask=is_dim, other=0)
    step = tl.load(Steps + of_head * HEAD_DIM + dim, mask=is_dim, other=0.0)
    has_codes = is_dim & (step > 0.0)
    in_steps = (keys - (means * unit)[None, :]) / tl.where(has_codes, step, 1.0)[None, :]
    in_steps = tl.where(is_key & has_codes[None, :], in_steps, 0.0)

    usual = in_steps * tl.load(Usual + width)[None, :]
    count = PAGE_SIZE * tl.maximum(tl.sum((width > 0).to(tl.int32), axis=0), 1)
    deviation = tl.sqrt(tl.sum(tl.sum(usual * usual, axis=1), axis=0) / count)
    logarithm = tl.floor(tl.log2(tl.maximum(deviation, 1.1754944e-38)) * _FACTORS + 0.5)
    logarithm = tl.minimum(tl.maximum(logarithm, -_LARGEST), _LARGEST)
    factor = tl.exp2(logarithm / _FACTORS)
    levels = (1 << width)[None, :]
    codes = tl.floor(in_steps / factor) + (levels // 2).to(tl.float32)
    codes = tl.minimum(tl.maximum(codes, 0.0), (levels - 1).to(tl.float32)).to(tl.int32)

    # Bit by bit of a token's string: each belongs to a channel.
    kept_bytes = tl.load(Sizes + layer)
    code_bytes = (kept_bytes - HEAD_DIM - _HEADER_BYTES) // PAGE_SIZE
    bit = tl.arange(0, 8 * BLOCK_BYTES)
    is_bit = bit < 8 * code_bytes
    channel = tl.load(Channels + of_head * (HEAD_DIM * _MOST_BITS) + bit, mask=is_bit, other=0).to(tl.int32)
    of_channel = bit - tl.load(Starts + of_head * HEAD_DIM + channel)
    index = tl.broadcast_to(channel[None, :], (BLOCK_T, 8 * BLOCK_BYTES))
    bits = (tl.gather(codes, index, 1) >> tl.where(is_bit, of_channel, 0)[None, :]) & 1
    in_place = tl.where(is_bit[None, :], bits << (bit % 8)[None, :], 0)
    packed = tl.sum(tl.reshape(in_place, (BLOCK_T, BLOCK_BYTES, 8)), axis=2)

    out = Kept + tl.load(Offsets + layer) + (page * KV_HEADS + head) * kept_bytes
    tl.store(out + dim, means.to(tl.int8), mask=is_dim)
    in_header = tl.arange(0, _HEADER_BYTES)
    tl.store(out + HEAD_DIM + in_header, tl.where(in_header == 0, logarithm.to(tl.int32), 0).to(tl.int8))
    byte = tl.arange(0, BLOCK_BYTES)
    at = byte[None, :] * PAGE_SIZE + token[:, None]
    is_byte = (token < PAGE_SIZE)[:, None] & (byte < code_bytes)[None, :]
    tl.store(out + (HEAD_DIM + _HEADER_BYTES) + at, packed.to(tl.int8), mask=is_byte)
    of_page = layer * num_pages + page
    tl.store(Units + of_page * KV_HEADS + head, unit)
    if (head == 0) & (page > 0):
        tl.store(IsBuilt + of_page, 1)


def warps_of(page_size: int, block_bytes: int) -> int:
    """So many that the numbers of a page fit their registers.

    Args:
        page_size: tokens per page.
        block_bytes: ``BLOCK_BYTES`` of the kernel; a few layers of a model have many more than the others.
    """
    if block_bytes > 64:
        return 16
    return 4 * max(1, min(4, triton.next_power_of_2(page_size) // 16))


def keep_pages(
    keys: torch.Tensor,
    rows: torch.Tensor,
    pages: torch.Tensor,
    tables: BitTables,
    kept: torch.Tensor,
    offsets: torch.Tensor,
    sizes: torch.Tensor,
    units: torch.Tensor,
    is_built: torch.Tensor,
    *,
    first_layer: int,
    most_bytes: int,
) -> None:
    """As ``MeanAndBits.keep``, but for how sums are rounded; asynchronous.

    Args:
        keys: [layers, rows, page size, KV heads, head dimension], of any type.
        rows: which of them are complete pages, int64 [pages].
        pages: their numbers in the pool, int64 [pages]; 0 for none.
        tables: of all layers.
        kept: of all layers, one behind the other, int8.
        offsets: where each begins in it, int64 [layers].
        sizes: bytes of a page and KV head in each, int32 [layers].
        units: of the means, float32 [layers, pool pages, KV heads].
        is_built: set where something is kept of a page, bool [layers, pool pages].
        first_layer: whose keys come first.
        most_bytes: largest of ``sizes``.
    """
    layers, num_rows, page_size, kv_heads, head_dim = keys.shape
    if not len(pages):
        return
    assert keys.is_contiguous()
    assert kept.is_contiguous()
    code_bytes = (most_bytes - head_dim - HEADER_BYTES) // page_size
    block_bytes = max(1, triton.next_power_of_2(code_bytes))
    _keep_kernel[(len(pages), kv_heads, layers)](
        keys,
        rows,
        pages,
        kept,
        offsets,
        sizes,
        units,
        is_built.view(torch.uint8),
        tables.widths,
        tables.starts,
        tables.steps,
        tables.channels,
        tables.usual,
        num_rows,
        units.shape[1],
        first_layer,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_T=triton.next_power_of_2(page_size),
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_BYTES=block_bytes,
        num_warps=warps_of(page_size, block_bytes),
    )

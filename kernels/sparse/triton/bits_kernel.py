"""Products of queries with keys that are kept as a mean and codes, for rows that have pages of their own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_importance_kernels.sparse.bit_tables import BitTables
from sgl_importance_kernels.sparse.triton.estimates import Estimates, store_estimates
from sgl_importance_kernels.sparse.triton.scan_kernel import dot_in_two_parts
from sgl_importance_kernels.triton.tiles import MIN_DOT_ROWS, dot_dtype

BLOCK_PAGES = MIN_DOT_ROWS
"""Pages of a tile. One token of each is multiplied at a time."""
BLOCK_D = 16
"""Channels that are multiplied at a time: of more, ptxas keeps some on a stack."""
STAGES = 2
"""Loads in flight: with Triton's three, ptxas puts 8 bytes on a stack for sm_90."""


@triton.jit(do_not_specialize=["pages_stride", "max_pages", "kept_bytes"])
def _codes_kernel(
    Q,
    Rows,
    Kept,
    Units,
    Widths,
    Starts,
    Steps,
    Pages,
    NumPages,
    Logits,
    Largest,
    Sums,
    scale,
    pages_stride,
    max_pages,
    kept_bytes,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    row = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(1)
    at = tl.program_id(0) * BLOCK_PAGES + tl.arange(0, BLOCK_PAGES)
    exists = at < tl.load(NumPages + row)
    page = tl.load(Pages + row * pages_stride + at, mask=exists, other=0)

    query = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + query
    of_row = Q + ((tl.load(Rows + row) * KV_HEADS * GROUP + head) * HEAD_DIM)[:, None]
    is_query = (query < GROUP)[:, None]
    of_page = Kept + (page * KV_HEADS + kv_head) * kept_bytes
    of_mean = tl.zeros((BLOCK_M, BLOCK_PAGES), tl.float32)
    offset = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, HEAD_DIM, BLOCK_D):
        dim = first + tl.arange(0, BLOCK_D)
        is_dim = dim < HEAD_DIM
        q = tl.load(of_row + dim[None, :], mask=is_query & is_dim[None, :], other=0.0).to(tl.float32)
        means = tl.load(of_page[None, :] + dim[:, None], mask=exists[None, :] & is_dim[:, None], other=0)
        of_mean = dot_in_two_parts(q * scale, means, of_mean, DOT_DTYPE)
        width = tl.load(Widths + kv_head * HEAD_DIM + dim, mask=is_dim, other=0)
        step = tl.load(Steps + kv_head * HEAD_DIM + dim, mask=is_dim, other=0.0)
        half = tl.where(width > 0, ((1 << width) // 2).to(tl.float32) - 0.5, 0.0)
        offset += tl.sum(q * scale * (step * half)[None, :], axis=1)

    largest = tl.full((BLOCK_M, BLOCK_PAGES), float("-inf"), tl.float32)
    for token in range(PAGE_SIZE):
        products = tl.zeros((BLOCK_M, BLOCK_PAGES), tl.float32)
        for first in range(0, HEAD_DIM, BLOCK_D):
            dim = first + tl.arange(0, BLOCK_D)
            is_dim = dim < HEAD_DIM
            q = tl.load(of_row + dim[None, :], mask=is_query & is_dim[None, :], other=0.0).to(tl.float32)
            width = tl.load(Widths + kv_head * HEAD_DIM + dim, mask=is_dim, other=0)
            start = tl.load(Starts + kv_head * HEAD_DIM + dim, mask=is_dim, other=0)
            step = tl.load(Steps + kv_head * HEAD_DIM + dim, mask=is_dim, other=0.0)
            bit = start % 8
            byte = (HEAD_DIM + 1 + start // 8 * PAGE_SIZE + token)[:, None]
            is_coded = exists[None, :] & (width > 0)[:, None]
            low = tl.load(of_page[None, :] + byte, mask=is_coded, other=0).to(tl.int32) & 0xFF
            goes_on = is_coded & (bit + width > 8)[:, None]
            high = tl.load(of_page[None, :] + byte + PAGE_SIZE, mask=goes_on, other=0).to(tl.int32) & 0xFF
            code = ((low | high << 8) >> bit[:, None]) & ((1 << width) - 1)[:, None]
            products = dot_in_two_parts(q * scale * step[None, :], code, products, DOT_DTYPE)
        largest = tl.maximum(largest, products)
    unit = tl.load(Units + page * KV_HEADS + kv_head, mask=exists, other=0.0)
    of_mean *= unit[None, :]
    logarithm = tl.load(of_page + HEAD_DIM, mask=exists, other=0).to(tl.float32)
    largest = (largest - offset[:, None]) * tl.exp2(logarithm / 8)[None, :]
    logits = tl.where(exists[None, :], largest + of_mean, float("-inf"))
    head_row = row * KV_HEADS * GROUP + head
    store_estimates(logits, head_row, query < GROUP, at, max_pages, Logits, Largest, Sums)


def scan_codes(
    queries: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    kept: torch.Tensor,
    units: torch.Tensor,
    tables: BitTables,
    pages: torch.Tensor,
    num_pages: torch.Tensor,
    page_size: int,
) -> Estimates:
    """The largest product of each query with the keys of each of its row's pages.

    Asynchronous: no shape depends on what a tensor holds.

    Args:
        queries: [tokens, heads, head dimension].
        rows: which of the tokens, int64 [rows].
        scale: factor on the queries.
        kept: of all pages of the pool, int8 [pool pages, KV heads, bytes]: the mean, a logarithm of
            the page's factor, then codes.
        units: of the means, float32 [pool pages, KV heads].
        tables: how the codes of the layer lie.
        pages: of each row, int64 [rows, most pages]; one row's for all where the first stride is 0.
        num_pages: how many of them each row has, int64 [rows].
        page_size: tokens per page.
    """
    num_rows, (_, heads, head_dim) = len(rows), queries.shape
    _, kv_heads, kept_bytes = kept.shape
    most = pages.shape[1]
    assert queries.is_contiguous()
    assert kept.is_contiguous()
    assert pages.stride(1) == 1, pages.stride()
    group = heads // kv_heads
    found = Estimates.empty(num_rows, heads, most, BLOCK_PAGES, queries.device)
    if num_rows and most:
        _codes_kernel[(triton.cdiv(most, BLOCK_PAGES), kv_heads, num_rows)](
            queries,
            rows,
            kept,
            units,
            tables.widths,
            tables.starts,
            tables.steps,
            pages,
            num_pages,
            *found,
            scale,
            pages.stride(0),
            most,
            kept_bytes,
            KV_HEADS=kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            PAGE_SIZE=page_size,
            BLOCK_M=max(MIN_DOT_ROWS, triton.next_power_of_2(group)),
            BLOCK_D=BLOCK_D,
            BLOCK_PAGES=BLOCK_PAGES,
            DOT_DTYPE=dot_dtype(torch.bfloat16),
            num_stages=STAGES,
        )
    return found

"""Products of queries with what is kept of pages, for rows that have pages of their own each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_importance_kernels.sparse.triton.estimates import Estimates, store_estimates
from sgl_importance_kernels.triton.tiles import MIN_DOT_ROWS, dot_dtype

TILE_VECTORS = 64
"""Vectors that are multiplied at a time: of 16 pages four. A tile of more has no room in shared memory."""


@triton.jit
def dot_in_two_parts(queries, vectors, products, DOT_DTYPE: tl.constexpr):
    """Products of float32 with whole numbers below 256 on tensor cores, added to ``products``: bfloat16 holds
    such numbers exactly, and of a float32 16 bits in two parts."""
    high = queries.to(tl.bfloat16)
    low = (queries - high.to(tl.float32)).to(tl.bfloat16)
    codes = vectors.to(tl.float32).to(DOT_DTYPE)
    products = tl.dot(high.to(DOT_DTYPE), codes, products, input_precision="ieee")
    return tl.dot(low.to(DOT_DTYPE), codes, products, input_precision="ieee")


@triton.jit(do_not_specialize=["pages_stride", "max_pages"])
def _scan_kernel(
    Q,
    Rows,
    Vectors,
    Units,
    Pages,
    NumPages,
    Logits,
    Largest,
    Sums,
    scale,
    pages_stride,
    max_pages,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_COUNT: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    row = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(1)
    at = tl.program_id(0) * BLOCK_PAGES + tl.arange(0, BLOCK_PAGES)
    exists = at < tl.load(NumPages + row)
    page = tl.load(Pages + row * pages_stride + at, mask=exists, other=0)

    query = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + query
    q_rows = (tl.load(Rows + row) * KV_HEADS * GROUP + head) * HEAD_DIM
    is_query = query < GROUP
    q = tl.load(
        Q + q_rows[:, None] + dim[None, :], mask=is_query[:, None] & (dim < HEAD_DIM)[None, :], other=0.0
    )
    q = q.to(tl.float32) * scale
    of_page = Vectors + (page * KV_HEADS + kv_head) * (COUNT * HEAD_DIM)
    TILE: tl.constexpr = BLOCK_PAGES * BLOCK_COUNT
    largest = tl.full((BLOCK_M, BLOCK_PAGES), float("-inf"), tl.float32)
    for first in range(0, COUNT, BLOCK_COUNT):
        vector = first + tl.arange(0, BLOCK_COUNT)
        starts = tl.reshape(of_page[:, None] + (vector * HEAD_DIM)[None, :], (TILE,))
        is_vector = tl.reshape(exists[:, None] & (vector < COUNT)[None, :], (TILE,))
        vectors = tl.load(
            starts[None, :] + dim[:, None], mask=is_vector[None, :] & (dim < HEAD_DIM)[:, None], other=0
        )
        products = dot_in_two_parts(q, vectors, tl.zeros((BLOCK_M, TILE), tl.float32), DOT_DTYPE)
        products = tl.where(is_vector[None, :], products, float("-inf"))
        of_block = tl.max(tl.reshape(products, (BLOCK_M, BLOCK_PAGES, BLOCK_COUNT)), axis=2)
        largest = tl.maximum(largest, of_block)
    unit = tl.load(Units + page * KV_HEADS + kv_head, mask=exists, other=0.0)
    logits = tl.where(exists[None, :], largest * unit[None, :], float("-inf"))
    head_row = row * KV_HEADS * GROUP + head
    tile, num_tiles = tl.program_id(0), tl.num_programs(0)
    store_estimates(logits, head_row, is_query, at, max_pages, tile, num_tiles, Logits, Largest, Sums)


def tile_of(count: int) -> tuple[int, int]:
    """Pages of a tile, and vectors of each that are multiplied at a time, where pages have ``count``."""
    block_count = min(triton.next_power_of_2(count), TILE_VECTORS // MIN_DOT_ROWS)
    return max(MIN_DOT_ROWS, TILE_VECTORS // block_count), block_count


def scan(
    queries: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    vectors: torch.Tensor,
    units: torch.Tensor,
    pages: torch.Tensor,
    num_pages: torch.Tensor,
) -> Estimates:
    """The largest product of each query with the vectors of each of its row's pages.

    Asynchronous: no shape depends on what a tensor holds.

    Args:
        queries: [tokens, heads, head dimension].
        rows: which of the tokens, int64 [rows].
        scale: factor on the queries.
        vectors: of all pages of the pool, int8 [pool pages, KV heads, vectors, head dimension].
        units: of these vectors, float32 [pool pages, KV heads].
        pages: of each row, int64 [rows, most pages]; one row's for all where the first stride is 0.
        num_pages: how many of them each row has, int64 [rows].
    """
    num_rows, (_, heads, head_dim) = len(rows), queries.shape
    _, kv_heads, count, _ = vectors.shape
    most = pages.shape[1]
    assert queries.is_contiguous()
    assert vectors.is_contiguous()
    assert pages.stride(1) == 1, pages.stride()
    group = heads // kv_heads
    block_pages, block_count = tile_of(count)
    found = Estimates.empty(num_rows, heads, most, block_pages, queries.device)
    if num_rows and most:
        _scan_kernel[(triton.cdiv(most, block_pages), kv_heads, num_rows)](
            queries,
            rows,
            vectors,
            units,
            pages,
            num_pages,
            *found,
            scale,
            pages.stride(0),
            most,
            KV_HEADS=kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            COUNT=count,
            BLOCK_M=max(MIN_DOT_ROWS, triton.next_power_of_2(group)),
            BLOCK_D=max(MIN_DOT_ROWS, triton.next_power_of_2(head_dim)),
            BLOCK_COUNT=block_count,
            BLOCK_PAGES=block_pages,
            DOT_DTYPE=dot_dtype(torch.bfloat16),
        )
    return found

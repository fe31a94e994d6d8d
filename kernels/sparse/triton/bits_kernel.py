"""Products of queries with keys that are kept as a mean and codes, for rows that have pages of their own."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sgl_importance_kernels.sparse.bit_tables import FACTORS_PER_DOUBLING, HEADER_BYTES, MOST_BITS, BitTables
from sgl_importance_kernels.sparse.bits_scan import CHUNK
from sgl_importance_kernels.sparse.triton.estimates import Estimates, store_estimates

BLOCK_PAGES = 16
"""Pages of a tile."""
MOST_TILES = 8
"""Of a program: what bits are worth to its queries is worked out once."""
LEAST_PROGRAMS = 1024
"""Before programs take more than one tile: several for each multiprocessor."""
LEAST_DOT_BYTES = 32
"""Of int8 on tensor cores."""
WARPS = 4
"""Of seven ways as fast as the fastest on an H200, and no number leaves the registers."""
_LARGEST_WHOLE = tl.constexpr(127 * 128)
_PAGE_CHUNK = tl.constexpr(CHUNK)
_MOST_BITS = tl.constexpr(MOST_BITS)
_HEADER_BYTES = tl.constexpr(HEADER_BYTES)
_FACTORS = tl.constexpr(FACTORS_PER_DOUBLING)


@triton.jit
def _in_two_parts(values, units, is_low):
    """Whole numbers of ``units``, 15 bits and a sign, as int8: the high part, or the low one. 128 of a high
    part and the low one are the number."""
    whole = tl.floor(values / units + 0.5).to(tl.int32)
    high = (whole + 64) >> 7
    return tl.where(is_low, whole - (high << 7), high).to(tl.int8)


@triton.jit
def _put_together(products):
    """From products with both parts in turn, [rows, 2 * queries], those with the numbers, [rows, queries]."""
    parts = tl.reshape(products, (products.shape[0], products.shape[1] // 2, 2))
    high, low = tl.split(parts)
    return (high << 7) + low


@triton.jit
def _lowest_bits(codes, PACKED: tl.constexpr):
    """The lowest bit of each int8; of four at a time in a register."""
    if PACKED:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0x01010101;", "=r,r", [codes], dtype=tl.int8, is_pure=True, pack=4
        )
    return codes & 1


@triton.jit
def _next_bits(codes, PACKED: tl.constexpr):
    """Each int8 with the next bit as its lowest; the bits above the lowest mean nothing then."""
    if PACKED:
        return tl.inline_asm_elementwise(
            "shr.b32 $0, $1, 1;", "=r,r", [codes], dtype=tl.int8, is_pure=True, pack=4
        )
    return codes >> 1


@triton.jit(do_not_specialize=["pages_stride", "max_pages", "num_tiles", "tiles", "kept_words", "code_bytes"])
def _codes_kernel(
    Q,
    Rows,
    Kept,
    Units,
    Widths,
    Steps,
    Channels,
    Worths,
    Pages,
    NumPages,
    Logits,
    Largest,
    Sums,
    scale,
    pages_stride,
    max_pages,
    num_tiles,
    tiles,
    kept_words,
    code_bytes,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    WORD: tl.constexpr,
    PACKED: tl.constexpr,
):
    row = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(1)
    num_pages = tl.load(NumPages + row)
    query = tl.arange(0, BLOCK_Q)
    head_row = (row * KV_HEADS + kv_head) * GROUP + query
    first_tile = tl.program_id(0) * tiles
    last_tile = tl.minimum(first_tile + tiles, num_tiles)
    if first_tile * BLOCK_PAGES >= num_pages:  # many in a captured step, whose contexts may grow
        for tile in range(first_tile, last_tile):
            at = tile * BLOCK_PAGES + tl.arange(0, BLOCK_PAGES)
            nothing = tl.full((BLOCK_Q, BLOCK_PAGES), float("-inf"), tl.float32)
            store_estimates(
                nothing, head_row, query < GROUP, at, max_pages, tile, num_tiles, Logits, Largest, Sums
            )
        return

    # Queries are whole numbers of a unit in two int8 parts, side by side: products are exact on tensor cores.
    column = tl.arange(0, 2 * BLOCK_Q)
    is_low = (column % 2 == 1)[None, :]
    is_query = (column // 2 < GROUP)[None, :]
    q_rows = Q + (tl.load(Rows + row) * KV_HEADS * GROUP + kv_head * GROUP + column // 2)[None, :] * HEAD_DIM
    dim = tl.arange(0, BLOCK_D)
    is_dim = dim < HEAD_DIM
    of_head = kv_head * HEAD_DIM + dim
    q = tl.load(q_rows + dim[:, None], mask=is_dim[:, None] & is_query, other=0.0).to(tl.float32) * scale
    mean_units = tl.maximum(tl.max(tl.abs(q), axis=0), 1e-30) / _LARGEST_WHOLE
    of_means = _in_two_parts(q, mean_units[None, :], is_low)
    width = tl.load(Widths + of_head, mask=is_dim, other=0)
    step = tl.load(Steps + of_head, mask=is_dim, other=0.0)
    highest = ((1 << width) // 2).to(tl.float32)  # what a code's highest bit counts; 0 without bits
    offsets = tl.sum(q * (step * tl.where(width > 0, highest - 0.5, 0.0))[:, None], axis=0)
    code_units = tl.max(tl.abs(q) * (step * highest)[:, None], axis=0)
    code_units = tl.maximum(code_units, 1e-30) / _LARGEST_WHOLE
    offset, _ = tl.split(tl.reshape(offsets, (BLOCK_Q, 2)))
    code_unit, _ = tl.split(tl.reshape(code_units, (BLOCK_Q, 2)))
    mean_unit, _ = tl.split(tl.reshape(mean_units, (BLOCK_Q, 2)))

    # What each bit is worth to each query, [bytes, columns, bits].
    byte = tl.arange(0, BLOCK_BYTES)
    is_byte = byte < code_bytes
    at_bit = kv_head * (HEAD_DIM * _MOST_BITS) + byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    channel = tl.load(Channels + at_bit, mask=is_byte[:, None], other=0).to(tl.int32)
    worth = tl.load(Worths + at_bit, mask=is_byte[:, None], other=0.0) * scale
    q_of_bit = tl.load(q_rows[:, :, None] + channel[:, None, :], mask=is_query[:, :, None], other=0.0)
    weights = q_of_bit.to(tl.float32) * worth[:, None, :]
    weights = _in_two_parts(weights, code_units[None, :, None], is_low[:, :, None])
    even, odd = tl.split(tl.reshape(weights, (BLOCK_BYTES, 2 * BLOCK_Q, 2, 2, 2)))
    bits_04, bits_26 = tl.split(even)
    bits_15, bits_37 = tl.split(odd)
    weights_0, weights_4 = tl.split(bits_04)
    weights_1, weights_5 = tl.split(bits_15)
    weights_2, weights_6 = tl.split(bits_26)
    weights_3, weights_7 = tl.split(bits_37)

    entry = tl.arange(0, BLOCK_PAGES * _PAGE_CHUNK)
    for tile in range(first_tile, last_tile):
        at = tile * BLOCK_PAGES + tl.arange(0, BLOCK_PAGES)
        exists = at < num_pages
        page = tl.load(Pages + row * pages_stride + at, mask=exists, other=0)
        of_page = Kept + (page * KV_HEADS + kv_head) * kept_words * WORD
        # One entry for each token of a chunk, page by page: the same bytes of four of them are a word.
        at_entry = tile * BLOCK_PAGES + entry // _PAGE_CHUNK
        is_entry = at_entry < num_pages
        of_entry = tl.load(Pages + row * pages_stride + at_entry, mask=is_entry, other=0) * KV_HEADS + kv_head
        of_entry = of_entry * kept_words * WORD + (HEAD_DIM + _HEADER_BYTES) + entry % _PAGE_CHUNK
        largest = tl.full((BLOCK_PAGES, BLOCK_Q), -(2**31), tl.int32)
        for first in range(0, PAGE_SIZE, _PAGE_CHUNK):
            where = of_entry[:, None] + (byte * PAGE_SIZE + first)[None, :]
            where = tl.max_contiguous(tl.multiple_of(where, (WORD, 1)), (WORD, 1))
            codes = tl.load(Kept + where, mask=is_entry[:, None] & is_byte[None, :], other=0)
            products = tl.dot(_lowest_bits(codes, PACKED), weights_0, out_dtype=tl.int32)
            codes = _next_bits(codes, PACKED)
            products = tl.dot(_lowest_bits(codes, PACKED), weights_1, products, out_dtype=tl.int32)
            codes = _next_bits(codes, PACKED)
            products = tl.dot(_lowest_bits(codes, PACKED), weights_2, products, out_dtype=tl.int32)
            codes = _next_bits(codes, PACKED)
            products = tl.dot(_lowest_bits(codes, PACKED), weights_3, products, out_dtype=tl.int32)
            codes = _next_bits(codes, PACKED)
            products = tl.dot(_lowest_bits(codes, PACKED), weights_4, products, out_dtype=tl.int32)
            codes = _next_bits(codes, PACKED)
            products = tl.dot(_lowest_bits(codes, PACKED), weights_5, products, out_dtype=tl.int32)
            codes = _next_bits(codes, PACKED)
            products = tl.dot(_lowest_bits(codes, PACKED), weights_6, products, out_dtype=tl.int32)
            codes = _next_bits(codes, PACKED)
            products = tl.dot(_lowest_bits(codes, PACKED), weights_7, products, out_dtype=tl.int32)
            of_keys = tl.reshape(_put_together(products), (BLOCK_PAGES, _PAGE_CHUNK, BLOCK_Q))
            largest = tl.maximum(largest, tl.max(of_keys, axis=1))
        means = tl.load(of_page[:, None] + dim[None, :], mask=exists[:, None] & is_dim[None, :], other=0)
        of_mean = _put_together(tl.dot(means, of_means, out_dtype=tl.int32))
        unit = tl.load(Units + page * KV_HEADS + kv_head, mask=exists, other=0.0)
        factor = tl.exp2(tl.load(of_page + HEAD_DIM, mask=exists, other=0).to(tl.float32) / _FACTORS)
        logits = (largest.to(tl.float32) * code_unit[None, :] - offset[None, :]) * factor[:, None]
        logits += of_mean.to(tl.float32) * mean_unit[None, :] * unit[:, None]
        logits = tl.trans(tl.where(exists[:, None], logits, float("-inf")))
        store_estimates(
            logits, head_row, query < GROUP, at, max_pages, tile, num_tiles, Logits, Largest, Sums
        )


def least_queries(device: torch.device) -> int:
    """Whose two parts are columns enough for tensor cores: 8, and 16 from Blackwell on."""
    is_newer = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10
    return 8 if is_newer else 4


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

    A code is a sum of its bits, each counting twice the one before it: bits of all codes are multiplied
    alike, whatever channel they belong to. Asynchronous: no shape depends on what a tensor holds.

    Args:
        queries: [tokens, heads, head dimension].
        rows: which of the tokens, int64 [rows].
        scale: factor on the queries.
        kept: of all pages of the pool, int8 [pool pages, KV heads, bytes]: the mean, a header whose
            first byte is a logarithm of the page's factor, then codes.
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
    code_bytes = (kept_bytes - head_dim - HEADER_BYTES) // page_size
    word = math.gcd(head_dim, HEADER_BYTES)  # bytes of different tokens that are loaded together
    found = Estimates.empty(num_rows, heads, most, BLOCK_PAGES, queries.device)
    num_tiles = triton.cdiv(most, BLOCK_PAGES)
    tiles = max(1, min(MOST_TILES, num_tiles * kv_heads * num_rows // LEAST_PROGRAMS))
    if num_rows and most:
        _codes_kernel[(triton.cdiv(num_tiles, tiles), kv_heads, num_rows)](
            queries,
            rows,
            kept,
            units,
            tables.widths,
            tables.steps,
            tables.channels,
            tables.worths,
            pages,
            num_pages,
            *found,
            scale,
            pages.stride(0),
            most,
            num_tiles,
            tiles,
            kept_bytes // word,
            code_bytes,
            KV_HEADS=kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            PAGE_SIZE=page_size,
            BLOCK_Q=max(least_queries(queries.device), triton.next_power_of_2(group)),
            BLOCK_D=max(LEAST_DOT_BYTES, triton.next_power_of_2(head_dim)),
            BLOCK_PAGES=BLOCK_PAGES,
            BLOCK_BYTES=max(LEAST_DOT_BYTES, triton.next_power_of_2(code_bytes)),
            WORD=word,
            PACKED=not triton.knobs.runtime.interpret,
            num_warps=WARPS,
            num_stages=1,
        )
    return found

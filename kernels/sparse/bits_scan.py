"""Products of queries with keys that are kept as a mean and codes of a few bits, compiled for CPUs.

A product is a sum over the bits of a token, each worth its channel's step times a power of two times the
query. So what four bits are worth together is written into a table of 16 for each query, and a page costs
one look-up for each four bits of a token instead of a multiplication for each channel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_importance_kernels.jit import njit
from sgl_importance_kernels.sparse.bit_tables import HEADER_BYTES
from sgl_importance_kernels.sparse.nibble_sums import CHUNK, TABLE_BYTES, largest_sums

_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": {"reassoc", "nsz", "contract"}}
_SIGNATURE = (
    "void(float32[:,:,:,::1], uint8[:,:,::1], float32[:,::1], int32[:,::1], int32[:,::1], float32[:,::1],"
    " int64[::1], int64, float32[:,:,:,::1])"
)
_SPAN = 65535
"""Sums are counted in units that make the largest of them less than this above the least."""
_FACTORS = np.exp2(np.arange(256, dtype=np.uint8).view(np.int8) / 8).astype(np.float32)
"""Of pages, by the byte that says their logarithm."""

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Whole = npt.NDArray[np.int32]


@njit("float32(float32[::1], int32[::1], int32[::1], float32[::1], uint8[:,:,:,::1])", **_OPTIONS)
def _write_tables(query: Floats, widths: Whole, starts: Whole, steps: Floats, tables: Bytes) -> Any:
    """What bits are worth to a query, around the middle of the least sum and the largest.

    Args:
        query: [dimension].
        widths: bits of each channel, [dimension].
        starts: of these among the token's, [dimension].
        steps: of codes, [dimension].
        tables: results, uint8 [bytes of a token, its lower and upper four bits, an entry's lower and upper
            byte, 16].

    Returns:
        The unit of the entries.
    """
    span = np.float32(0.0)
    for channel in range(len(query)):
        span += abs(query[channel] * steps[channel]) * ((1 << widths[channel]) - 1)
    unit = max(span / (_SPAN - 8 * len(tables)), np.finfo(np.float32).tiny)
    worth = np.zeros(8 * len(tables), np.int32)
    for channel in range(len(query)):
        for bit in range(widths[channel]):
            of_bit = query[channel] * steps[channel] * (1 << bit)
            worth[starts[channel] + bit] = np.int32(np.rint(of_bit / unit))
    middle = worth.sum() >> 1
    totals = np.empty(16, np.int32)
    for byte in range(len(tables)):
        for upper in range(2):
            totals[0] = 0 if byte or upper else -middle
            for bit in range(4):
                for bits in range(1 << bit):
                    totals[bits + (1 << bit)] = totals[bits] + worth[8 * byte + 4 * upper + bit]
            for bits in range(16):
                tables[byte, upper, 0, bits] = totals[bits] & 255
                tables[byte, upper, 1, bits] = totals[bits] >> 8 & 255
    return unit


@njit(_SIGNATURE, **_OPTIONS)
def largest_of_codes(
    queries: Floats,
    kept: Bytes,
    units: Floats,
    widths: Whole,
    starts: Whole,
    steps: Floats,
    pages: npt.NDArray[np.int64],
    page_size: int,
    logits: Floats,
) -> None:
    """The largest product of each query with the keys of each page.

    Args:
        queries: float32 [tokens, KV heads, queries of each, dimension].
        kept: of every page of the pool, [pool pages, KV heads, bytes]: the mean as int8, a header whose
            first byte is eight times the binary logarithm of the page's factor, then codes as ``BitTables``
            says.
        units: of the means, float32 [pool pages, KV heads].
        widths: bits of each channel, int32 [KV heads, dimension].
        starts: before how many of a token's bits they begin, int32 [KV heads, dimension].
        steps: of the codes, float32 [KV heads, dimension].
        pages: whose keys count, int64 [pages].
        page_size: tokens per page, a multiple of ``CHUNK``.
        logits: results, float32 [tokens, KV heads, queries of each, pages].
    """
    num_tokens, num_heads, group, dim = queries.shape
    num_queries = num_tokens * group
    num_bytes = (kept.shape[2] - dim - HEADER_BYTES) // page_size
    tables = np.empty((num_queries, num_bytes, 2, 2, CHUNK), np.uint8)
    table_units = np.empty(num_queries, np.float32)
    of_chunk = np.zeros(2, np.int16)
    mean = np.empty(dim, np.float32)
    best = np.empty(2, np.int16)
    for head in range(num_heads):
        for row in range(num_queries):
            table_units[row] = _write_tables(
                queries[row // group, head, row % group],
                widths[head],
                starts[head],
                steps[head],
                tables[row],
            )
        codes = kept.ctypes.data + head * kept.strides[1] + dim + HEADER_BYTES
        for first in range(0, len(pages), 2):
            count = min(2, len(pages) - first)
            for row in range(num_queries):
                best[:] = 0 if num_bytes == 0 else -32768
                for chunk in range(page_size // CHUNK if num_bytes else 0):
                    one = codes + pages[first] * kept.strides[0] + chunk * CHUNK
                    other = codes + pages[first + count - 1] * kept.strides[0] + chunk * CHUNK
                    largest_sums(  # type: ignore[call-arg]  # numba gives the first
                        np.uintp(one),
                        np.uintp(other),
                        np.uintp(page_size),
                        np.uintp(num_bytes),
                        np.uintp(tables.ctypes.data + row * num_bytes * TABLE_BYTES),
                        np.uintp(of_chunk.ctypes.data),
                    )
                    best[0] = max(best[0], of_chunk[0])
                    best[1] = max(best[1], of_chunk[1])
                for at in range(count):
                    logits[row // group, head, row % group, first + at] = table_units[row] * best[at]
            for at in range(count):
                page = pages[first + at]
                for channel in range(dim):
                    mean[channel] = np.int8(kept[page, head, channel])
                factor = _FACTORS[kept[page, head, dim]]
                for row in range(num_queries):
                    token, query = row // group, row % group
                    of_mean = np.float32(0.0)
                    for channel in range(dim):
                        of_mean += queries[token, head, query, channel] * mean[channel]
                    of_codes = logits[token, head, query, first + at]
                    logits[token, head, query, first + at] = factor * of_codes + of_mean * units[page, head]

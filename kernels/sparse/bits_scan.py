"""Products of queries with keys that are kept as a mean and codes of a few bits, compiled for CPUs.

Codes are whole numbers from 0; steps, and what half the codes are worth, are multiplied into each query once,
so that a code only has to be taken out of its byte. Eight tokens at a time fill a vector register.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_importance_kernels.jit import njit
from sgl_importance_kernels.sparse.bit_tables import MOST_BITS

_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": {"reassoc", "nsz", "contract"}}
_SIGNATURE = (
    "void(float32[:,:,:,::1], uint8[:,:,::1], float32[:,::1], int32[:,::1], float32[:,::1], int64[::1],"
    " int64, float32[:,:,:,::1])"
)
TOKENS = 8

Floats = npt.NDArray[np.float32]
Whole = npt.NDArray[np.int32]


@njit("void(uint8[::1], int64, float32[::1])", inline="always", **_OPTIONS)
def unpack(packed: npt.NDArray[np.uint8], width: int, codes: Floats) -> None:
    """Codes of eight tokens, out of as many bytes as each has bits."""
    if width <= 4:
        word = np.uint32(0)
        for at in range(width):
            word |= np.uint32(packed[at]) << np.uint32(8 * at)
        mask = np.uint32((1 << width) - 1)
        for token in range(TOKENS):
            codes[token] = np.float32(np.int32((word >> np.uint32(token * width)) & mask))
    else:
        wide = np.uint64(0)
        for at in range(width):
            wide |= np.uint64(packed[at]) << np.uint64(8 * at)
        for token in range(TOKENS):
            code = (wide >> np.uint64(token * width)) & np.uint64((1 << width) - 1)
            codes[token] = np.float32(np.int32(code))


@njit(_SIGNATURE, **_OPTIONS)
def largest_of_codes(
    queries: Floats,
    kept: npt.NDArray[np.uint8],
    units: Floats,
    widths: Whole,
    steps: Floats,
    pages: npt.NDArray[np.int64],
    page_size: int,
    logits: Floats,
) -> None:
    """The largest product of each query with the keys of each page.

    Args:
        queries: float32 [tokens, KV heads, queries of each, dimension].
        kept: of every page of the pool, [pool pages, KV heads, bytes]: the mean as int8, eight times the
            binary logarithm of the page's factor as int8, then codes as ``BitTables`` says.
        units: of the means, float32 [pool pages, KV heads].
        widths: bits of each channel, int32 [KV heads, dimension].
        steps: of its codes, float32 [KV heads, dimension].
        pages: whose keys count, int64 [pages].
        page_size: tokens per page, a multiple of 8.
        logits: results, float32 [tokens, KV heads, queries of each, pages].
    """
    num_tokens, num_heads, group, dim = queries.shape
    num_queries = num_tokens * group
    groups = page_size // TOKENS
    channels, ends = np.empty(dim, np.int64), np.empty(MOST_BITS + 1, np.int64)
    scaled, offsets = np.empty((num_queries, dim), np.float32), np.empty(num_queries, np.float32)
    plain = np.empty((num_queries, dim), np.float32)
    codes = np.empty((dim, page_size), np.float32)
    mean = np.empty(dim, np.float32)
    sums = np.empty(page_size, np.float32)
    for head in range(num_heads):
        coded = 0
        for width in range(MOST_BITS, 0, -1):
            for channel in range(dim):
                if widths[head, channel] == width:
                    channels[coded] = channel
                    coded += 1
            ends[width] = coded
        for token in range(num_tokens):
            for query in range(group):
                row = token * group + query
                offset = np.float32(0.0)
                for at in range(coded):
                    channel = channels[at]
                    factor = queries[token, head, query, channel] * steps[head, channel]
                    scaled[row, at] = factor
                    half = np.float32((1 << widths[head, channel]) // 2) - np.float32(0.5)
                    offset -= factor * half
                offsets[row] = offset
                for channel in range(dim):
                    plain[row, channel] = queries[token, head, query, channel]
        for at_page in range(len(pages)):
            row_bytes = kept[pages[at_page], head]
            for channel in range(dim):
                mean[channel] = np.int8(row_bytes[channel])
            factor_of_page = np.float32(2.0 ** (np.int8(row_bytes[dim]) / 8.0))
            byte = dim + 1
            first = 0
            for width in range(MOST_BITS, 0, -1):
                for at in range(first, ends[width]):
                    for eight in range(groups):
                        into = codes[at, eight * TOKENS : (eight + 1) * TOKENS]
                        unpack(row_bytes[byte : byte + width], width, into)
                        byte += width
                first = ends[width]
            for row in range(num_queries):
                of_mean = np.float32(0.0)
                for channel in range(dim):
                    of_mean += plain[row, channel] * mean[channel]
                for token in range(page_size):
                    sums[token] = np.float32(0.0)
                for at in range(coded):
                    factor = scaled[row, at]
                    for token in range(page_size):
                        sums[token] += factor * codes[at, token]
                best = np.float32(-np.inf)
                for token in range(page_size):
                    best = max(best, sums[token])
                logits[row // group, head, row % group, at_page] = (
                    factor_of_page * (best + offsets[row]) + of_mean * units[pages[at_page], head]
                )

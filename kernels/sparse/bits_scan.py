"""Products of queries with keys that are kept as a mean and codes of a few bits, compiled for CPUs.

Codes are whole numbers from 0; steps are multiplied into each query, and what half the codes are worth is
taken off at the end, so that a code only has to be taken out of its bytes. A channel of
``BLOCK_PAGES`` pages is done at a time, of these the first tokens of all groups of eight, then the second:
neighbours are shifted alike, so that they fill vector registers.
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
"""Whose codes lie together."""
BLOCK_PAGES = 16

Floats = npt.NDArray[np.float32]
Whole = npt.NDArray[np.int32]


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
    codes = np.empty(BLOCK_PAGES * page_size, np.float32)
    sums = np.empty((num_queries, BLOCK_PAGES * page_size), np.float32)
    offsets = np.empty(num_queries, np.float32)
    mean = np.empty(dim, np.float32)
    halves = np.empty((2, BLOCK_PAGES * groups), np.uint32)  # of each eight tokens' word, four a half
    for head in range(num_heads):
        for row in range(num_queries):
            offsets[row] = 0.0
            for channel in range(dim):
                half = np.float32(1 << widths[head, channel]) / 2 - np.float32(0.5)
                offsets[row] -= (
                    queries[row // group, head, row % group, channel] * steps[head, channel] * half
                )
        for first in range(0, len(pages), BLOCK_PAGES):
            count = min(BLOCK_PAGES, len(pages) - first)
            many = count * groups
            sums[:] = 0.0
            byte = dim + 1
            for width in range(MOST_BITS, 0, -1):
                mask = np.uint32((1 << width) - 1)
                for channel in range(dim):
                    if widths[head, channel] != width:
                        continue
                    for at in range(count):
                        page = pages[first + at]
                        for group_of_page in range(groups):
                            word = np.uint64(0)
                            for part in range(width):
                                packed = kept[page, head, byte + group_of_page * width + part]
                                word |= np.uint64(packed) << np.uint64(8 * part)
                            halves[0, at * groups + group_of_page] = np.uint32(word)
                            halves[1, at * groups + group_of_page] = np.uint32(word >> np.uint64(4 * width))
                    for token in range(TOKENS):
                        word_half, shift = token // 4, np.uint32(token % 4 * width)
                        for at in range(many):
                            codes[token * many + at] = np.float32(
                                np.int32((halves[word_half, at] >> shift) & mask)
                            )
                    byte += groups * width
                    for row in range(num_queries):
                        scaled = queries[row // group, head, row % group, channel] * steps[head, channel]
                        for token in range(count * page_size):
                            sums[row, token] += scaled * codes[token]
            for at in range(count):
                page = pages[first + at]
                for channel in range(dim):
                    mean[channel] = np.int8(kept[page, head, channel])
                factor = np.float32(2.0 ** (np.int8(kept[page, head, dim]) / 8.0))
                for row in range(num_queries):
                    token, query = row // group, row % group
                    of_mean = np.float32(0.0)
                    for channel in range(dim):
                        of_mean += queries[token, head, query, channel] * mean[channel]
                    best = np.float32(-np.inf)
                    for key in range(TOKENS):
                        for group_of_page in range(groups):
                            best = max(best, sums[row, key * many + at * groups + group_of_page])
                    logits[token, head, query, first + at] = (
                        factor * (best + offsets[row]) + of_mean * units[page, head]
                    )

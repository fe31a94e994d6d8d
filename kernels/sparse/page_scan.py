"""Products of queries with what is kept of pages, compiled for CPUs: pages are read where they are.

The int8 vectors of a page and head become float32 once for all queries: products of small whole numbers took
twice the time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_importance_kernels.jit import njit

_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": {"reassoc", "nsz", "contract"}}
_SIGNATURE = "void(float32[:,:,:,::1], int8[:,:,:,::1], float32[:,::1], int64[::1], float32[:,:,:,::1])"

Floats = npt.NDArray[np.float32]


@njit(_SIGNATURE, **_OPTIONS)
def largest_dot(
    queries: Floats,
    vectors: npt.NDArray[np.int8],
    scales: Floats,
    pages: npt.NDArray[np.int64],
    logits: Floats,
) -> None:
    """The largest product of each query with the vectors of each page.

    Args:
        queries: float32 [tokens, KV heads, queries of each, dimension].
        vectors: of every page of the pool, int8 [pool pages, KV heads, vectors, dimension].
        scales: their unit, float32 [pool pages, KV heads].
        pages: whose vectors count, int64 [pages].
        logits: results, float32 [tokens, KV heads, queries of each, pages].
    """
    num_tokens, num_heads, group, dim = queries.shape
    count = vectors.shape[2]
    of_page = np.empty((count, dim), np.float32)
    for at in range(len(pages)):
        page = pages[at]
        for head in range(num_heads):
            for vector in range(count):
                for each in range(dim):
                    of_page[vector, each] = vectors[page, head, vector, each]
            for token in range(num_tokens):
                for query in range(group):
                    best = np.float32(-np.inf)
                    for vector in range(count):
                        total = np.float32(0.0)
                        for each in range(dim):
                            total += queries[token, head, query, each] * of_page[vector, each]
                        best = max(best, total)
                    logits[token, head, query, at] = best * scales[page, head]

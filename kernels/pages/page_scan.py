"""Products of queries with what is kept of pages, compiled for CPUs: pages are read where they are.

Keys that are kept are int8. Queries become int8, too, so that sums are whole numbers: the same in any order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_importance_kernels.jit import njit

_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": {"reassoc", "nsz", "contract"}}
_SIGNATURE = (
    "void(int8[:,:,:,::1], float32[:,:,::1], int8[:,:,:,::1], float32[:,::1], int64[::1], float32[:,:,:,::1])"
)


@njit(_SIGNATURE, **_OPTIONS)
def largest_dot(
    queries: npt.NDArray[np.int8],
    query_scales: npt.NDArray[np.float32],
    vectors: npt.NDArray[np.int8],
    scales: npt.NDArray[np.float32],
    pages: npt.NDArray[np.int64],
    logits: npt.NDArray[np.float32],
) -> None:
    """The largest product of each query with the vectors of each page.

    Args:
        queries: int8 [tokens, KV heads, queries of each, dimension].
        query_scales: their unit, float32 [tokens, KV heads, queries of each].
        vectors: of every page of the pool, int8 [pool pages, KV heads, vectors, dimension].
        scales: their unit, float32 [pool pages, KV heads].
        pages: whose vectors count, int64 [pages].
        logits: results, float32 [tokens, KV heads, queries of each, pages].
    """
    num_tokens, num_heads, group, dim = queries.shape
    for at in range(len(pages)):
        page = pages[at]
        for head in range(num_heads):
            for token in range(num_tokens):
                for query in range(group):
                    best = np.int32(-2147483648)
                    for vector in range(vectors.shape[2]):
                        total = np.int32(0)
                        for each in range(dim):
                            total += np.int32(queries[token, head, query, each]) * np.int32(
                                vectors[page, head, vector, each]
                            )
                        best = max(best, total)
                    unit = scales[page, head] * query_scales[token, head, query]
                    logits[token, head, query, at] = np.float32(best) * unit


@njit(_SIGNATURE, **_OPTIONS)
def box_bound(
    queries: npt.NDArray[np.int8],
    query_scales: npt.NDArray[np.float32],
    vectors: npt.NDArray[np.int8],
    scales: npt.NDArray[np.float32],
    pages: npt.NDArray[np.int64],
    logits: npt.NDArray[np.float32],
) -> None:
    """The largest product that a key between two corners could have; arguments as in ``largest_dot``.

    Args:
        vectors: the upper corner, then the lower.
    """
    num_tokens, num_heads, group, dim = queries.shape
    for at in range(len(pages)):
        page = pages[at]
        for head in range(num_heads):
            for token in range(num_tokens):
                for query in range(group):
                    total = np.int32(0)
                    for each in range(dim):
                        number = np.int32(queries[token, head, query, each])
                        total += max(
                            number * np.int32(vectors[page, head, 0, each]),
                            number * np.int32(vectors[page, head, 1, each]),
                        )
                    unit = scales[page, head] * query_scales[token, head, query]
                    logits[token, head, query, at] = np.float32(total) * unit

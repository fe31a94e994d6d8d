"""Attention of single queries to pages where they lie, in slots or staged; compiled for CPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_importance_kernels.jit import njit

_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": {"reassoc", "nsz", "contract"}}

Floats = npt.NDArray[np.float32]


@njit(**_OPTIONS)
def _add_page(
    queries: Floats,
    keys: Floats,
    values: Floats,
    num_tokens: int,
    scale: float,
    logits: Floats,
    largest: Floats,
    sums: Floats,
    outputs: Floats,
) -> None:
    """Adds one page; arguments as in ``attend_pages``, keys and values [page size, KV heads, dimension]."""
    num_heads, group, dim = queries.shape
    value_dim = values.shape[2]
    for head in range(num_heads):
        for query in range(group):
            top = largest[head, query]
            for token in range(num_tokens):
                total = np.float32(0.0)
                for each in range(dim):
                    total += queries[head, query, each] * keys[token, head, each]
                logits[token] = total * scale
                top = max(top, logits[token])
            if top > largest[head, query]:
                factor = np.exp(largest[head, query] - top)
                largest[head, query] = top
                sums[head, query] *= factor
                for each in range(value_dim):
                    outputs[head, query, each] *= factor
            for token in range(num_tokens):
                weight = np.exp(logits[token] - top)
                sums[head, query] += weight
                for each in range(value_dim):
                    outputs[head, query, each] += weight * values[token, head, each]


@njit(
    "void(float32[:,:,::1], float32[:,:,:,::1], float32[:,:,:,::1], float32[:,:,:,::1], float32[:,:,:,::1], "
    "int64[::1], int64, float32, float32[:,::1], float32[:,::1], float32[:,:,::1])",
    **_OPTIONS,
)
def attend_pages(
    queries: Floats,
    slot_keys: Floats,
    slot_values: Floats,
    staged_keys: Floats,
    staged_values: Floats,
    places: npt.NDArray[np.int64],
    num_tokens: int,
    scale: float,
    largest: Floats,
    sums: Floats,
    outputs: Floats,
) -> None:
    """Adds pages to the attention of one token, page by page (Milakov and Gimelshein, 2018).

    Args:
        queries: float32 [KV heads, queries of each, dimension].
        slot_keys: of a layer, float32 [slots, page size, KV heads, dimension].
        slot_values: likewise.
        staged_keys: the staging buffer's, float32 [staged pages, page size, KV heads, dimension].
        staged_values: likewise.
        places: of the pages in order: a slot, or behind the slots, a staged page; int64 [pages].
        num_tokens: of the pages; only the last one may be partial.
        scale: factor on the logits.
        largest: largest logit so far, -inf at first; float32 [KV heads, queries of each].
        sums: of the weights so far, relative to it; likewise.
        outputs: weighted values so far; float32 [KV heads, queries of each, value dimension].
    """
    num_slots, page_size = slot_keys.shape[0], slot_keys.shape[1]
    logits = np.empty(page_size, np.float32)
    for at in range(len(places)):
        place = places[at]
        tokens = min(page_size, num_tokens - at * page_size)
        if place < num_slots:
            keys, values = slot_keys[place], slot_values[place]
        else:
            keys, values = staged_keys[place - num_slots], staged_values[place - num_slots]
        _add_page(queries, keys, values, tokens, scale, logits, largest, sums, outputs)

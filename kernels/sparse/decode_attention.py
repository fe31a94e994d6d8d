"""Attention of single queries to pages where they lie, in slots or on the host; compiled for CPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

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
    """Adds one page to the attention of one token.

    Args:
        queries: [KV heads, queries of each, dimension].
        keys: of the page, [page size, KV heads, dimension].
        values: likewise.
        num_tokens: of the page that count.
        scale: factor on the logits.
        logits: room for those of a page, [page size].
        largest: largest logit so far, -inf at first; [KV heads, queries of each].
        sums: of the weights so far, relative to it; likewise.
        outputs: weighted values so far; [KV heads, queries of each, value dimension].
    """
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
    "void(float32[:,:,:,::1], float32[:,:,:,::1], float32[:,:,:,::1], float32[:,:,:,::1], "
    "float32[:,:,:,::1], int64[:,::1], int64[::1], float32, float32[:,:,:,::1])",
    **_OPTIONS,
)
def _attend_rows(
    queries: Floats,
    slot_keys: Floats,
    slot_values: Floats,
    host_keys: Floats,
    host_values: Floats,
    places: npt.NDArray[np.int64],
    last_tokens: npt.NDArray[np.int64],
    scale: float,
    outputs: Floats,
) -> None:
    """Row by row and page by page (Milakov and Gimelshein, 2018); arguments as in ``attend_places``.

    Args:
        queries: float32 [rows, KV heads, queries of each, dimension].
        outputs: results, float32 [rows, KV heads, queries of each, value dimension].
    """
    num_slots, page_size = slot_keys.shape[0], slot_keys.shape[1]
    logits = np.empty(page_size, np.float32)
    for row in range(len(queries)):
        largest: Floats = np.full(queries.shape[1:3], -np.inf, np.float32)
        sums: Floats = np.zeros(queries.shape[1:3], np.float32)
        of_row = outputs[row]
        of_row[:] = 0
        for column in range(places.shape[1]):
            place = places[row, column]
            if place < 0:
                continue
            tokens = last_tokens[row] if column == 0 else page_size
            if place < num_slots:
                keys, values = slot_keys[place], slot_values[place]
            else:
                keys, values = host_keys[place - num_slots], host_values[place - num_slots]
            _add_page(queries[row], keys, values, tokens, scale, logits, largest, sums, of_row)
        for head in range(sums.shape[0]):
            for query in range(sums.shape[1]):
                of_row[head, query] /= sums[head, query]


def attend_places(
    queries: torch.Tensor,
    slots: tuple[torch.Tensor, torch.Tensor],
    host: tuple[torch.Tensor, torch.Tensor],
    places: torch.Tensor,
    last_tokens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """As ``attend_places`` of ``triton/attention_kernel.py``, of rows alone; float32 pages only.

    Args:
        queries: [rows, heads, head dimension].

    Returns:
        Outputs, float32 [rows, heads, value dimension].
    """
    num_rows, heads, _ = queries.shape
    kv_heads, value_dim = slots[1].shape[-2:]
    by_kv_head = queries.float().view(num_rows, kv_heads, heads // kv_heads, -1).contiguous()
    outputs = torch.empty(num_rows, kv_heads, heads // kv_heads, value_dim)
    _attend_rows(
        by_kv_head.numpy(),
        slots[0].numpy(),
        slots[1].numpy(),
        host[0].numpy(),
        host[1].numpy(),
        places.numpy(),
        last_tokens.numpy(),
        scale,
        outputs.numpy(),
    )
    return outputs.flatten(1, 2)

"""Attention of a decode step to pages in slots and on the host: Triton's, or compiled for CPUs."""

from __future__ import annotations

import torch

from sgl_importance_kernels.sparse import decode_attention
from sgl_importance_kernels.sparse.page_slots import PageSlots


def can_attend_in_place(slots: PageSlots) -> bool:
    """Whether ``attend_step`` reads such pages: compiled for CPUs there are float32 ones only."""
    return slots.uses_triton or slots.keys.dtype == torch.float32


def attend_step(
    slots: PageSlots,
    layer: int,
    queries: torch.Tensor,
    rows: torch.Tensor,
    places: torch.Tensor,
    last_tokens: torch.Tensor,
    scale: float,
    outputs: torch.Tensor,
) -> None:
    """Attention of one token a row to the row's pages. A row's result depends on its own pages only.

    Args:
        slots: where the pages are.
        layer: index among the pool's layers.
        queries: of all tokens of the pass, [tokens, heads, head dimension].
        rows: which of them attend, int64 [rows].
        places: of the pages, from ``PageSlots.place``, int64 [rows, most pages]; -1 for none. The first of a
            row is read up to ``last_tokens``, the others whole.
        last_tokens: tokens of the first page that count, int64 [rows], at least one.
        scale: factor on the logits.
        outputs: results, [tokens, heads, value dimension]; only ``rows`` are written.
    """
    kept, host = (slots.keys[layer], slots.values[layer]), slots.host[layer]
    if slots.uses_triton:
        from sgl_importance_kernels.sparse.triton.attention_kernel import (
            attend_places,
        )  # a CPU needs no Triton

        arrivals = slots.arrivals_of(len(rows))
        attend_places(queries.contiguous(), rows, kept, host, places, last_tokens, scale, arrivals, outputs)
        return
    found = decode_attention.attend_places(queries[rows], kept, host, places, last_tokens, scale)
    outputs[rows] = found.to(outputs.dtype)

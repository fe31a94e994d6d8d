"""What a choice of pages missed, by exact attention to the host's copy of all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_importance_kernels.pages.page_slots import PageSlots
from sgl_importance_kernels.pages.running_attention import RunningAttention
from sgl_importance_kernels.pages.streamed_attention import PartialAttention, attend


@dataclass(frozen=True, slots=True)
class Audit:
    """What exact attention says of one token in one layer.

    Attributes:
        missed_mass: share of its attention outside the pages that it read, mean over heads, from 0 to 1.
        output_error: length of the difference between its output and the exact one, in lengths of that.
        exact: attention to all pages.
    """

    missed_mass: float
    output_error: float
    exact: PartialAttention


def audit(
    read: PartialAttention,
    queries: torch.Tensor,
    slots: PageSlots,
    layer: int,
    pages: torch.Tensor,
    num_tokens: int,
    scale: float,
) -> Audit:
    """Compares the attention to chosen pages with that to all of them. Moves no page and counts no read.

    Args:
        read: attention to the chosen pages.
        queries: of one token, [1, heads, head dimension].
        slots: where the pages are.
        layer: index among the pool's layers.
        pages: of the whole context, in order; int64 [pages].
        num_tokens: of the context; only the last page may be partial.
        scale: factor on the logits.
    """
    slots.flush(layer)
    exact = PartialAttention()
    exact.add(*_attend_on_host(queries, slots, layer, pages, num_tokens, scale))
    found = (read.log_sum - exact.log_sum).exp().clamp(max=1.0)
    difference = (read.output - exact.output).norm() / exact.output.norm()
    return Audit(float(1 - found.mean()), float(difference), exact)


def _attend_on_host(
    queries: torch.Tensor, slots: PageSlots, layer: int, pages: torch.Tensor, num_tokens: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one token to pages on the host, as a part for ``PartialAttention``."""
    keys, values = slots.host[layer]
    if keys.dtype != torch.float32 or queries.device.type != "cpu":
        of_context = (host[pages].flatten(0, 1)[:num_tokens] for host in (keys, values))
        return attend(queries, *(tokens.to(queries.device) for tokens in of_context), scale)
    running = RunningAttention(queries, *values.shape[-2:], scale)
    running.add(keys, values, slots.staging, pages, num_tokens)
    return running.part()

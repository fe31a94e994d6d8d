"""What a choice of pages missed, by exact attention to the host's copy of all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from sgl_importance_kernels.sparse.page_slots import PageSlots
from sgl_importance_kernels.sparse.streamed_attention import PartialAttention, tiles


@dataclass(frozen=True, slots=True)
class Audit:
    """What exact attention says of one token in one layer.

    Attributes:
        missed_mass: share of its attention outside the pages that it read, mean over heads, from 0 to 1.
        missed_page: largest share of a head's attention that one page has which was not read, from 0 to 1.
        output_error: length of the difference between its output and the exact one, in lengths of that.
    """

    missed_mass: float
    missed_page: float
    output_error: float


def audit(
    read: PartialAttention,
    chosen: torch.Tensor,
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
        chosen: those pages, int64.
        queries: of one token, [1, heads, head dimension].
        slots: where the pages are.
        layer: index among the pool's layers.
        pages: of the whole context, in order; int64 [pages].
        num_tokens: of the context; only the last page may be partial.
        scale: factor on the logits.
    """
    slots.flush(layer)
    host_keys, host_values = slots.host[layer]
    by_kv_head = queries.float().view(host_keys.shape[2], -1, queries.shape[-1]) * scale
    exact, of_pages = PartialAttention(), []
    for part, valid in tiles(pages, num_tokens, slots):
        keys, values = (
            host[part.to(host.device)].flatten(0, 1)[:valid].to(queries.device).float()
            for host in (host_keys, host_values)
        )
        logits = torch.einsum("kgd,nkd->kgn", by_kv_head, keys).flatten(0, 1)
        log_sum = logits.logsumexp(dim=-1)
        weights = (logits - log_sum[:, None]).exp().view(*by_kv_head.shape[:2], -1)
        exact.add(torch.einsum("kgn,nkd->kgd", weights, values).flatten(0, 1)[None], log_sum[None])
        whole = pad(logits, (0, len(part) * slots.page_size - valid), value=-torch.inf)
        of_pages.append(whole.unflatten(1, (len(part), slots.page_size)).logsumexp(dim=-1))
    shares = (torch.cat(of_pages, dim=1) - exact.log_sum[0, :, None]).exp()
    missed = shares[:, ~torch.isin(pages, chosen)]
    difference = (read.output - exact.output).norm() / exact.output.norm()
    return Audit(
        missed_mass=float(missed.sum(dim=1).mean()),
        missed_page=float(missed.amax()) if missed.numel() else 0.0,
        output_error=float(difference),
    )

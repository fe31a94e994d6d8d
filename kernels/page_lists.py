"""Attention of one token to each page of its context, apart for every KV head."""

from __future__ import annotations

import torch


def page_masses(
    queries: torch.Tensor,
    keys: torch.Tensor,
    locations: torch.Tensor,
    page_size: int,
    *,
    scale: float,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention mass of each page, mean over the query heads of a KV head; float32 [KV heads, pages].

    A head's masses sum to 1, or to what its sink leaves.

    Args:
        queries: of one token after positional encoding, any float dtype, [heads, head dimension].
        keys: the pool of keys, any float dtype, [slots, KV heads, head dimension].
        locations: slot of each token that it sees, itself included; integers [tokens].
        page_size: tokens per page; the last page may be partial.
        scale: factor on the dot product.
        logit_cap: soft cap of the scaled logits; 0 means none.
        sinks: learnt logit of each query head that takes part in its softmax, [heads]; None for none.
    """
    kv_heads, tokens = keys.shape[1], len(locations)
    seen = keys.index_select(0, locations).float().permute(1, 2, 0)
    by_kv_head = queries.float().view(kv_heads, -1, queries.shape[-1])
    logits = torch.matmul(by_kv_head * scale, seen)
    if logit_cap > 0:
        logits = logit_cap * torch.tanh(logits / logit_cap)
    totals = logits.logsumexp(dim=-1, keepdim=True)
    if sinks is not None:
        totals = torch.logaddexp(totals, sinks.float().view(kv_heads, -1, 1))
    weights = (logits - totals).exp_().mean(dim=1)
    padded = torch.nn.functional.pad(weights, (0, -tokens % page_size))
    return padded.view(kv_heads, -1, page_size).sum(dim=-1)


def best_first(masses: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages of largest mass, int64, and their masses, float32; both [..., count], best first.

    Equal masses go to the first page.

    Args:
        masses: [..., pages].
        count: at most as many as there are pages.
    """
    ordered, pages = masses.sort(dim=-1, descending=True, stable=True)
    return pages[..., :count], ordered[..., :count]

"""Mass, peak and body mass of KV pages: the definition, in plain torch and float32.

Every producer is tested against this file, so it is written for reading: full matrices, no blocking, no
shortcut. A *page* is ``page_size`` consecutive tokens of a sequence, counted from its first token; the last
page may be partial. For one query token t at position p (0-based) that sees tokens 0 .. p:

- attention probability a[h, i] of layer l: softmax over i <= p of ``cap(scale * q[h] . k[kv(h), i])``,
  where ``cap(x) = c * tanh(x / c)`` if the layer has a logit soft cap c, and kv(h) = h // (query heads per
  KV head). Where a head has learnt a sink, a logit that belongs to no token, the softmax is over it too;
- **mass** of page b: mean over query heads of the sum of a[h, i] over its tokens i. Sums to 1 over pages, or
  to what learnt sinks leave;
- **peak** of page b: maximum over query heads of the same sum: one retrieval head among a hundred is
  invisible in a mean and plain in a maximum;
- **body** of page b: as mass, but only over the body, the tokens S <= i < p + 1 - R: the first S tokens
  (attention sinks, Xiao et al. 2023, arXiv 2309.17453) and the last R tokens that the query sees (itself
  included) are large for reasons that say nothing about reuse. S and R count tokens, not pages, so a page on
  the border of the body counts with its inner tokens only.

Over the sampled layers: mass and body are the mean over layers, peak is the maximum; then, once, **body
mass** is the averaged body divided by its sum over pages. So a layer that spends all its attention on sinks
has little say in the body mass, and a query token always weighs 1, or 0 where its body is empty or its
probability there is below the smallest normal float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl_importance_kernels.page_rows import EMPTY_BODY


@dataclass(frozen=True, slots=True)
class PageScores:
    """Scores of each query token, float32 [num_q, num_pages] each.

    Attributes:
        mass: sums to 1 over pages, or to what learnt sinks leave.
        peak: in [0, 1], at least ``mass``.
        body: of one layer, the part of ``mass`` that lies in the body, sums to at most 1; of combined
            layers, the body mass, which sums to 1 over pages, or to 0 where the body is empty.
    """

    mass: torch.Tensor
    peak: torch.Tensor
    body: torch.Tensor


def attention_probabilities(
    q: torch.Tensor,
    k: torch.Tensor,
    query_positions: torch.Tensor,
    *,
    scale: float,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention probabilities of one layer.

    Args:
        q: queries after positional encoding, [num_q, num_heads, head_dim].
        k: keys of the sequence from its first token on, [kv_len, num_kv_heads, head_dim]; num_heads is a
            multiple of num_kv_heads.
        query_positions: 0-based position of each query token, integer [num_q], each below kv_len.
        scale: factor on the dot product.
        logit_cap: soft cap of the scaled logits; 0 means none.
        sinks: learnt logit of each query head that takes part in its softmax, [num_heads]; None where the
            layer has none.

    Returns:
        float32 [num_heads, num_q, kv_len]; rows sum to 1, or to what the sinks leave; tokens after the
        query's own have 0.
    """
    num_q, num_heads, head_dim = q.shape
    kv_len, num_kv_heads, _ = k.shape
    assert k.shape[2] == head_dim, (q.shape, k.shape)
    assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
    assert query_positions.shape == (num_q,), (query_positions.shape, num_q)
    assert int(query_positions.min()) >= 0, "positions count from 0"
    assert int(query_positions.max()) < kv_len, "a query token sees its own key"

    keys = k.float().repeat_interleave(num_heads // num_kv_heads, dim=1)
    logits = scale * torch.einsum("qhd,khd->hqk", q.float(), keys)
    if logit_cap > 0:
        logits = logit_cap * torch.tanh(logits / logit_cap)
    visible = torch.arange(kv_len, device=k.device) <= query_positions[:, None]
    logits = logits.masked_fill(~visible, float("-inf"))
    if sinks is None:
        return torch.softmax(logits, dim=-1)
    column = sinks.float().view(num_heads, 1, 1).expand(-1, num_q, -1)
    return torch.softmax(torch.cat((logits, column), dim=-1), dim=-1)[..., :-1]


def pages_of(token_values: torch.Tensor, page_size: int) -> torch.Tensor:
    """Sums per page: [..., kv_len] -> [..., num_pages], the last page as long as there are tokens."""
    kv_len = token_values.shape[-1]
    page = torch.arange(kv_len, device=token_values.device) // page_size
    num_pages = -(-kv_len // page_size)
    sums = token_values.new_zeros((*token_values.shape[:-1], num_pages))
    return sums.index_add_(-1, page, token_values)


def layer_page_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    query_positions: torch.Tensor,
    *,
    scale: float,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    page_size: int,
    sink_tokens: int,
    local_tokens: int,
) -> PageScores:
    """Mass, peak and (not yet normalised) body of one layer.

    Args:
        q, k, query_positions, scale, logit_cap, sinks: as for ``attention_probabilities``.
        page_size: tokens per page.
        sink_tokens: S, first tokens of the sequence outside the body, in tokens.
        local_tokens: R, last tokens seen by the query, itself included, outside the body, in tokens.
    """
    probabilities = attention_probabilities(
        q, k, query_positions, scale=scale, logit_cap=logit_cap, sinks=sinks
    )
    per_head = pages_of(probabilities, page_size)
    token = torch.arange(k.shape[0], device=k.device)
    in_body = (token >= sink_tokens) & (token < query_positions[:, None] + 1 - local_tokens)
    return PageScores(
        mass=per_head.mean(dim=0),
        peak=per_head.amax(dim=0),
        body=pages_of(probabilities.mean(dim=0) * in_body, page_size),
    )


def combine_layers(layers: Sequence[PageScores]) -> PageScores:
    """Scores over the sampled layers of one forward pass, with the body normalised to body mass."""
    assert layers, "at least one sampled layer"
    body = torch.stack([layer.body for layer in layers]).mean(dim=0)
    total = body.sum(dim=-1, keepdim=True)
    return PageScores(
        mass=torch.stack([layer.mass for layer in layers]).mean(dim=0),
        peak=torch.stack([layer.peak for layer in layers]).amax(dim=0),
        body=torch.where(total > EMPTY_BODY, body / total, torch.zeros_like(body)),
    )

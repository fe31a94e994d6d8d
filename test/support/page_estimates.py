"""Pages of drawn keys, what a selector says of them, and what exact attention would."""

from __future__ import annotations

import torch

from sgl_importance_kernels.sparse.representations import Representations
from sgl_importance_lab.selectors.registry import ready_selector

PAGES, SIZE, KV_HEADS, GROUP, DIM = 12, 16, 2, 3, 16


def drawn(seed: int, tokens: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of all pages, and queries."""
    draws = torch.Generator().manual_seed(seed)
    keys = torch.randn(PAGES, SIZE, KV_HEADS, DIM, generator=draws)
    return keys, torch.randn(tokens, KV_HEADS * GROUP, DIM, generator=draws)


def estimated(name: str, keys: torch.Tensor, queries: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """What a selector of this name says of the pages, [tokens * heads, pages]."""
    representations = Representations(ready_selector(name, keys[None]), (keys,), "cpu")
    return representations.selector.logits(queries, representations.of(0, pages))


def exact(keys: torch.Tensor, queries: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Every logit, [tokens * heads, pages, page size]."""
    by_head = queries.view(len(queries), KV_HEADS, GROUP, DIM)
    return torch.einsum("tkgd,pskd->tkgps", by_head, keys[pages]).reshape(-1, len(pages), SIZE)

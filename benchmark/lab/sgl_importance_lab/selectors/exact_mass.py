"""``oracle``: the attention that each page really gets, read from all keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sgl_importance_kernels.sparse.selectors.selector import Selector

if TYPE_CHECKING:
    from sgl_importance_kernels.sparse.layer_pages import LayerPages


class ExactMass(Selector):
    """Bounds from above what any selector of pages can do; it reads every key on the host in every step."""

    def logits(self, queries: torch.Tensor, pages: LayerPages) -> torch.Tensor:
        keys = pages.keys()  # [pages, tokens, KV heads, dimension]
        tokens, heads, dim = queries.shape
        by_kv_head = queries.view(tokens, keys.shape[2], -1, dim)
        logits = torch.einsum("tkgd,pskd->tkgps", by_kv_head, keys)
        return logits.logsumexp(dim=-1).view(tokens * heads, -1)

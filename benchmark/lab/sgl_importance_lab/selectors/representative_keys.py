"""The keys of a page that are farthest from its mean stand for it."""

from __future__ import annotations

import torch

from sgl_importance_kernels.sparse.selectors.selector import LargestDot


class RepresentativeKeys(LargestDot):
    """Keeps the keys farthest from the page's mean key, as a query that looks for one token looks for those.

    Such outliers are what ShadowKV (Sun et al., 2024) keeps whole; there by chunk, here by page and head.

    Args:
        page_size: tokens per page.
        count: keys kept; all of a smaller page.
    """

    def __init__(self, page_size: int, count: int = 4) -> None:
        super().__init__(page_size)
        self.vectors_per_page = min(count, page_size)

    def represent(self, keys: torch.Tensor) -> torch.Tensor:
        distances = (keys - keys.mean(dim=1, keepdim=True)).square().sum(dim=-1)  # [pages, tokens, heads]
        farthest = distances.topk(self.vectors_per_page, dim=1).indices.movedim(1, 2)  # [pages, heads, count]
        by_head = keys.movedim(1, 2)  # [pages, heads, tokens, dimension]
        return by_head.gather(2, farthest[..., None].expand(*farthest.shape, keys.shape[-1]))

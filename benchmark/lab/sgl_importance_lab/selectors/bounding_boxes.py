"""``quest``: the largest logit that any key within a page's bounding box could have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sgl_importance_kernels.sparse.selectors.selector import Selector

if TYPE_CHECKING:
    from sgl_importance_kernels.sparse.layer_pages import LayerPages


class BoundingBoxes(Selector):
    """As Quest (Tang et al., 2024): sum over dimensions of max(q * largest key, q * smallest key)."""

    vectors_per_page = 2

    def represent(self, keys: torch.Tensor) -> torch.Tensor:
        return torch.stack([keys.amax(dim=1), keys.amin(dim=1)], dim=2)

    def logits(self, queries: torch.Tensor, pages: LayerPages) -> torch.Tensor:
        tokens, heads, dim = queries.shape
        units = pages.units[pages.numbers][..., None, None]
        corners = pages.kept[pages.numbers].unflatten(2, (2, dim)) * units
        by_kv_head = queries.view(tokens, corners.shape[1], -1, dim)
        upper, lower = (
            torch.einsum("tkgd,pkd->tkgp", side, corners[:, :, corner])
            for corner, side in enumerate((by_kv_head.clamp(min=0), by_kv_head.clamp(max=0)))
        )
        return (upper + lower).reshape(tokens * heads, -1)

"""``window``: the most recent pages, whatever the query."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sgl_importance_kernels.sparse.selectors.selector import Selector

if TYPE_CHECKING:
    from sgl_importance_kernels.sparse.layer_pages import LayerPages


class RecentPages(Selector):
    """As StreamingLLM (Xiao et al., 2023): sinks, which are always in, and a window."""

    def logits(self, queries: torch.Tensor, pages: LayerPages) -> torch.Tensor:
        return torch.arange(len(pages.numbers), dtype=torch.float32, device=queries.device)[None]

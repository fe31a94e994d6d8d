"""``infllm``: blocks of 128 tokens that are read or left whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from sgl_importance_lab.selectors.representative_keys import RepresentativeKeys

if TYPE_CHECKING:
    from sgl_importance_kernels.sparse.layer_pages import LayerPages

BLOCK_TOKENS = 128


class KeyBlocks(RepresentativeKeys):
    """As InfLLM (Xiao et al., 2024): a block is as good as the best of its representative keys.

    InfLLM represents a block by the keys that the queries of a local window liked best. Pages that come
    from storage have no queries any more, so here, too, the keys farthest from the mean of their page do.
    A budget that ends within a block reads part of it.

    Args:
        page_size: tokens per page.
    """

    product = None

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size, count=max(1, 4 * page_size // BLOCK_TOKENS))
        self._pages = max(1, BLOCK_TOKENS // page_size)

    def logits(self, queries: torch.Tensor, pages: LayerPages) -> torch.Tensor:
        of_pages = super().logits(queries, pages)
        padded = pad(of_pages, (0, -of_pages.shape[1] % self._pages), value=-torch.inf)
        blocks: torch.Tensor = padded.unflatten(1, (-1, self._pages))
        best: torch.Tensor = blocks.amax(dim=2, keepdim=True).expand_as(blocks).flatten(1)
        return best[:, : of_pages.shape[1]]

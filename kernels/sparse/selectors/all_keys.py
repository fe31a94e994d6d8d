"""``token``: every token's own key, in int8."""

from __future__ import annotations

import torch

from sgl_importance_kernels.sparse.selectors.selector import LargestDot


class AllKeys(LargestDot):
    """Keeps every key: a page is read if one of its tokens is among the best."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self.vectors_per_page = page_size

    def represent(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.movedim(1, 2)

"""Selectors that ship, by the names that ``--kv-sparse-selector`` knows them by."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sgl_importance_kernels.sparse.selectors.mean_and_bits import MeanAndBits
from sgl_importance_kernels.sparse.selectors.selector import LargestDot, Selector


class AllKeys(LargestDot):
    """Keeps every key: a page is read if one of its tokens is among the best."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self.vectors_per_page = page_size

    def represent(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.movedim(1, 2)


SELECTORS: dict[str, Callable[[int], Selector]] = {
    "bits": MeanAndBits,
    "token": AllKeys,
}
"""Each takes the tokens per page."""

"""``mean``: a page is as good as its mean key."""

from __future__ import annotations

import torch

from sgl_importance_kernels.sparse.selectors.selector import LargestDot


class MeanKey(LargestDot):
    """Keeps one vector, the mean, as the landmarks of ShadowKV (Sun et al., 2024) are."""

    vectors_per_page = 1

    def represent(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.mean(dim=1)[:, :, None]

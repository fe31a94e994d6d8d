"""Values of pages that no server offers, for comparison with those that one does."""

from __future__ import annotations

from typing import Literal

import torch

from sgl_importance_kernels.sparse.page_history import DECAY, PageHistory

Fading = Literal["ema", "importance", "lfu"]


class FadingHistory(PageHistory):
    """Values pages by their choices, summed.

    Args:
        by: ``ema`` counts choices that fade by ``DECAY`` a pass, ``importance`` the attention that pages were
            chosen for, which fades likewise, ``lfu`` choices that do not fade.
        num_layers: layers, each with pages of its own.
        num_pages: logical pages.

    Attributes:
        shares: of attention that the pages of the next chosen read are chosen for, float32 [pages].
    """

    def __init__(self, by: Fading, num_layers: int, num_pages: int) -> None:
        super().__init__(num_layers, num_pages, "cpu")
        self.shares = torch.zeros(0)
        self._by = by
        self._decay = 1.0 if by == "lfu" else DECAY
        self._sums = torch.zeros(num_layers, num_pages)

    def read(self, layer: int, pages: torch.Tensor, now: int, *, is_chosen: bool) -> None:
        """As in ``PageHistory``; ``pages`` are all there, none is -1."""
        self._sums[layer, pages] = self.worth(layer, pages, self.last_read(layer, pages), now)
        if is_chosen:
            chosen = self.shares if self._by == "importance" else torch.ones(len(pages))
            self._sums[layer].index_add_(0, pages, chosen)
        super().read(layer, pages, now, is_chosen=is_chosen)

    def worth(self, layer: int, pages: torch.Tensor, last_read: torch.Tensor, now: int) -> torch.Tensor:
        """As in ``PageHistory``, float32 [pages]."""
        return self._sums[layer, pages] * torch.pow(self._decay, (now - last_read).float())

    def forget(self, pages: torch.Tensor) -> None:
        """The pages were freed."""
        super().forget(pages)
        self._sums[:, pages] = 0


class RandomHistory(PageHistory):
    """Values pages by chance: the control that knows nothing of them but who was read just now."""

    def __init__(self, num_layers: int, num_pages: int, seed: int) -> None:
        super().__init__(num_layers, num_pages, "cpu")
        self._draws = torch.Generator().manual_seed(seed)

    def worth(self, layer: int, pages: torch.Tensor, last_read: torch.Tensor, now: int) -> torch.Tensor:
        """A number for each page, float32 [pages]."""
        return torch.rand(len(pages), generator=self._draws)

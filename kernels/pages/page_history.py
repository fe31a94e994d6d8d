"""When and how often each page was read, and which pages in slots are worth least by it."""

from __future__ import annotations

from typing import Literal

import torch

Residency = Literal["lru", "lfu", "ema"]

NEVER = -2
"""Pass that an unread page was last read in: before the two that keep a page from a stream."""

DECAY = 0.95
"""Of what a read is worth, by pass, under ``ema``."""


class PageHistory:
    """Reads of every page in every layer. It outlives a page's stay in a slot, not the page.

    Args:
        policy: ``lru`` values a page by its last read, ``lfu`` by the number of its reads, ``ema`` by reads
            that fade with time.
        num_layers: layers, each with pages of its own.
        num_pages: logical pages of the pool.
        device: where the tables are.
    """

    def __init__(
        self, policy: Residency, num_layers: int, num_pages: int, device: torch.device | str
    ) -> None:
        self._policy = policy
        self._decay = {"lru": 0.0, "lfu": 1.0, "ema": DECAY}[policy]
        self._reads = torch.zeros(num_layers, num_pages, dtype=torch.float32, device=device)
        self._last = torch.full((num_layers, num_pages), NEVER, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Device bytes."""
        return self._reads.nbytes + self._last.nbytes

    def read(self, layer: int, pages: torch.Tensor, now: int) -> None:
        """Pages, int64 [pages], were read in pass ``now``; a second read in a pass counts as none."""
        last = self._last[layer, pages]
        again = (last < now).float()
        self._reads[layer, pages] = self._reads[layer, pages] * self._decay ** (now - last).float() + again
        self._last[layer, pages] = now

    def last_read(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Passes that pages were last read in, int32 [pages]."""
        return self._last[layer, pages]

    def worth(self, layer: int, pages: torch.Tensor, now: int) -> torch.Tensor:
        """How much pages are worth keeping in pass ``now``, [pages]; only the order means something."""
        last = self._last[layer, pages]
        if self._policy == "lru":
            return last.double()
        return self._reads[layer, pages] * self._decay ** (now - last).float()

    def forget(self, pages: torch.Tensor) -> None:
        """The pages were freed."""
        self._reads[:, pages] = 0
        self._last[:, pages] = NEVER

    def clear(self) -> None:
        """Forgets every page."""
        self._reads.zero_()
        self._last.fill_(NEVER)

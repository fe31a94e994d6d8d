"""When and how often each page was read, and which pages in slots are worth least by it."""

from __future__ import annotations

import math
from typing import Literal

import torch

Residency = Literal["lru", "bucketed_lru", "lfu", "ema", "importance"]

NEVER = -2
"""Pass that an unread page was last read in: before the two that keep a page from a stream."""

DECAY = 0.95
"""What is left of a choice after each pass: ``ema`` and ``importance`` go by it, the live page shows it."""


class PageHistory:
    """Reads of every page in every layer. It outlives a page's stay in a slot, not the page.

    Args:
        policy: ``lru`` values a page by its last read, ``bucketed_lru`` by that in powers of two of passes, a
            bounded range that a device can count through where ``lru`` must sort (SPIN), ``lfu`` (only in
            replays) by how often it was chosen, ``ema`` by choices that fade with time, ``importance`` by the
            attention that it was chosen for, which fades, too.
        num_layers: layers, each with pages of its own.
        num_pages: logical pages of the pool.
        device: where the tables are.
    """

    def __init__(
        self, policy: Residency, num_layers: int, num_pages: int, device: torch.device | str
    ) -> None:
        self._policy = policy
        self._decay = 1.0 if policy == "lfu" else DECAY
        self._choices = torch.zeros(num_layers, num_pages, dtype=torch.float32, device=device)
        self._last = torch.full((num_layers, num_pages), NEVER, dtype=torch.int32, device=device)

    @property
    def policy(self) -> Residency:
        """As it was given."""
        return self._policy

    @property
    def log_decay(self) -> float:
        """Binary logarithm of what is left of choices after a pass."""
        return math.log2(self._decay)

    def tables(self, layer: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Passes of last reads, int32, and choices as of these, float32; [layers, pages], or a layer's."""
        return (self._last, self._choices) if layer is None else (self._last[layer], self._choices[layer])

    @property
    def num_bytes(self) -> int:
        """Device bytes."""
        return self._choices.nbytes + self._last.nbytes

    def read(self, layer: int, pages: torch.Tensor, now: int, shares: torch.Tensor | None) -> None:
        """Pages were read. No shape depends on what a tensor holds.

        Args:
            layer: index among the pool's layers.
            pages: int64 [pages]; -1 for none, and one that several requests read, several times.
            now: the pass.
            shares: of attention that they were chosen for, float32 [pages]; None where nobody chose them,
                which says nothing of what they are worth.
        """
        known = pages.clamp(min=0)
        self._choices[layer, known] = self._choices[layer, known] * self._fading(layer, known, now)
        if shares is not None:
            # A NaN of one request would stay on pages that others read, and such a page in its slot.
            shares = shares.nan_to_num(0.0)
            chosen = (pages >= 0) * (shares if self._policy == "importance" else 1.0)
            self._choices[layer].index_add_(0, known, chosen.float())
        self._last[layer, known] = now

    def last_read(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Passes that pages were last read in, int32 [pages]."""
        return self._last[layer, pages]

    def worth(self, layer: int, pages: torch.Tensor, now: int) -> torch.Tensor:
        """How much pages are worth keeping in pass ``now``, int32 or float32 [pages]; only the order means
        something."""
        last = self._last[layer, pages]
        if self._policy == "lru":
            return last
        if self._policy == "bucketed_lru":
            return -torch.frexp((now - last).float()).exponent
        return self._choices[layer, pages] * self._fading(layer, pages, now)

    def choices(self, pages: torch.Tensor, now: int) -> torch.Tensor:
        """How often pages were chosen of late in each layer, by the policy; float32 [layers, pages]."""
        fading = torch.pow(self._decay, (now - self._last[:, pages]).float())
        return self._choices[:, pages] * fading

    def _fading(self, layer: int, pages: torch.Tensor, now: int) -> torch.Tensor:
        return torch.pow(self._decay, (now - self._last[layer, pages]).float())

    def forget(self, pages: torch.Tensor) -> None:
        """The pages were freed."""
        self._choices[:, pages] = 0
        self._last[:, pages] = NEVER

    def clear(self) -> None:
        """Forgets every page."""
        self._choices.zero_()
        self._last.fill_(NEVER)

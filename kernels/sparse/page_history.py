"""When and how often each page was read, and which pages in slots are worth least by it."""

from __future__ import annotations

import torch

from sgl_importance_kernels.sparse.slot_loops import note_reads

NEVER = -2
"""Pass that an unread page was last read in: before the two that keep a page from a stream."""

DECAY = 0.95
"""What is left of a choice after each pass, as the live page shows it."""


class PageHistory:
    """Reads of every page in every layer. It outlives a page's stay in a slot, not the page.

    Args:
        num_layers: layers, each with pages of its own.
        num_pages: logical pages of the pool.
        device: where the tables are.
    """

    def __init__(self, num_layers: int, num_pages: int, device: torch.device | str) -> None:
        self._choices = torch.zeros(num_layers, num_pages, dtype=torch.float32, device=device)
        self._last = torch.full((num_layers, num_pages), NEVER, dtype=torch.int32, device=device)

    @property
    def last_reads(self) -> torch.Tensor:
        """Passes of last reads, int32 [layers, pages]."""
        return self._last

    @property
    def choices_then(self) -> torch.Tensor:
        """Choices as of the last reads, float32 [layers, pages]."""
        return self._choices

    @property
    def num_bytes(self) -> int:
        """Device bytes."""
        return self._choices.nbytes + self._last.nbytes

    def read(self, layer: int, pages: torch.Tensor, now: int, *, is_chosen: bool) -> None:
        """Pages were read. On a CPU; under Triton ``place_pages`` notes it.

        Args:
            layer: index among the pool's layers.
            pages: int64 [pages]; -1 for none, and one that several requests read, several times.
            now: the pass.
            is_chosen: whether a selector chose them; where nobody did, it says nothing of them.
        """
        choices, last = self._choices[layer].numpy(), self._last[layer].numpy()
        note_reads(pages.numpy(), now, is_chosen, DECAY, choices, last)

    def last_read(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Passes that pages were last read in, int32 [pages]."""
        return self._last[layer, pages]

    def worth(self, layer: int, pages: torch.Tensor, last_read: torch.Tensor, now: int) -> torch.Tensor:
        """How much pages are worth keeping: least recently read ones least. The laboratory's replays differ.

        Args:
            layer: index among the pool's layers.
            pages: int64 [pages].
            last_read: of these, as ``last_read`` returns it.
            now: the pass.

        Returns:
            A number for each, [pages]; only the order means something.
        """
        return last_read

    def choices(self, pages: torch.Tensor, now: int) -> torch.Tensor:
        """How often pages were chosen of late in each layer; float32 [layers, pages]."""
        return self._choices[:, pages] * torch.pow(DECAY, (now - self._last[:, pages]).float())

    def forget(self, pages: torch.Tensor) -> None:
        """The pages were freed."""
        self._choices[:, pages] = 0
        self._last[:, pages] = NEVER

    def clear(self) -> None:
        """Forgets every page."""
        self._choices.zero_()
        self._last.fill_(NEVER)

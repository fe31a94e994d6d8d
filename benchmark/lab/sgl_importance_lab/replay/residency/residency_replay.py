"""What residency would load, counted by the slot table of ``PageSlots`` without keys and values."""

from __future__ import annotations

from typing import get_args

import numpy as np
import numpy.typing as npt
import torch

from sgl_importance_kernels.sparse.page_history import PageHistory
from sgl_importance_kernels.sparse.slot_table import SlotTable
from sgl_importance_lab.replay.residency.compared_histories import Fading, FadingHistory, RandomHistory

Numbers = npt.NDArray[np.int64]


class ResidencyReplay:
    """Slots of several layers under one policy. Heads that choose for themselves are layers of their own.

    Args:
        policy: ``lru`` as in the server, one of ``FadingHistory``, or ``random``.
        num_layers: layers, each with slots of its own.
        num_pages: different pages that are read.
        num_slots: pages that a layer keeps.
        staging_pages: pages of a context that are read at a time by several tokens.
        seed: of ``random``.
    """

    def __init__(
        self,
        policy: str,
        *,
        num_layers: int,
        num_pages: int,
        num_slots: int,
        staging_pages: int,
        seed: int = 0,
    ) -> None:
        sizes = num_layers, num_pages + 1  # page 0 of a table is padding's
        self._history: PageHistory
        if policy == "random":
            self._history = RandomHistory(*sizes, seed)
        elif policy in get_args(Fading):
            self._history = FadingHistory(policy, *sizes)  # type: ignore[arg-type]
        else:
            self._history = PageHistory(*sizes, "cpu")
        self._table = SlotTable(self._history, *sizes, num_slots, 0, "cpu")
        self._staging_pages = staging_pages

    def begin_pass(self) -> None:
        """A forward pass begins."""
        self._table.begin_pass()

    def is_resident(self, layer: int, pages: Numbers) -> npt.NDArray[np.bool_]:
        """Whether pages have a slot, bool [pages]."""
        found: npt.NDArray[np.bool_] = self._table.is_resident(layer, torch.from_numpy(pages) + 1).numpy()
        return found

    def read(
        self, layer: int, pages: Numbers, shares: npt.NDArray[np.float32] | None, *, open_page: int = -1
    ) -> int:
        """Reads pages as one token does; how many of them came from the host.

        Args:
            layer: index among the layers.
            pages: int64 [pages].
            shares: of attention that they were chosen for, float32 [pages]; None where all of a context is
                read.
            open_page: the page that the request fills: it is on the device without a slot.
        """
        numbers = torch.from_numpy(pages) + 1
        if isinstance(self._history, FadingHistory) and shares is not None:
            self._history.shares = torch.from_numpy(shares)
        in_frame = torch.where(numbers == open_page + 1, 0, -1)
        slots, brought, _ = self._table.read(layer, numbers, in_frame, is_chosen=shares is not None)
        return int((slots < 0).sum() + (brought >= 0).sum())

    def stream(self, layer: int, pages: Numbers) -> int:
        """Reads all pages of a context for several tokens, as much at a time as can be staged; the loads."""
        parts = range(0, len(pages), self._staging_pages)
        return sum(self.read(layer, pages[at : at + self._staging_pages], None) for at in parts)

    def forget(self, pages: Numbers) -> None:
        """The pages were freed."""
        self._table.forget(torch.from_numpy(pages) + 1)

    def check_integrity(self) -> None:
        """Raises AssertionError unless the tables agree and nobody has more than its slots."""
        self._table.check_integrity()

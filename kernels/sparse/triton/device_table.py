"""The tables of residency as kernels use them: nothing is asked of the device, and little is launched."""

from __future__ import annotations

import torch

from sgl_importance_kernels.sparse.slot_table import SlotTable
from sgl_importance_kernels.sparse.triton.slot_kernel import LEVELS, order_slots, place_pages


class DeviceTable:
    """Gives slots of a ``SlotTable`` by the levels of ``slot_kernel``, in one launch a layer.

    Args:
        table: whose tables are read and written.
        frame_of: slot of each page that is being filled, int64 [pages]; -1 of the others.
        totals: pages that were read, and that came from the host, int64 [2]; counted there.
    """

    def __init__(self, table: SlotTable, frame_of: torch.Tensor, totals: torch.Tensor) -> None:
        layers, slots = table.page_in.shape
        device = table.page_in.device
        self._table, self._frame_of, self._totals = table, frame_of, totals
        self._now = torch.zeros(1, dtype=torch.int32, device=device)
        self._counts = torch.zeros(layers, 2, LEVELS, dtype=torch.int32, device=device)
        self._order = torch.zeros(layers, slots - table.first_slot, 2, dtype=torch.int32, device=device)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)

    @property
    def num_bytes(self) -> int:
        """Device bytes, without those of the tables."""
        return sum(part.nbytes for part in (self._now, self._counts, self._order, self._count))

    def begin_pass(self) -> None:
        """A forward pass begins, whose pages are where they are; before the first ``place``."""
        table, history = self._table, self._table.history
        self._now.fill_(table.now)
        order_slots(
            table.page_in,
            history.last_reads,
            self._now,
            self._counts,
            self._order,
            first_slot=table.first_slot,
        )

    def place(
        self, layer: int, pages: torch.Tensor, *, is_chosen: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pages are read, and those without a slot get one, as far as there are any; ``PageSlots.place``.

        Returns:
            Places, then what ``bring_pages`` copies: pages, slots and their number.
        """
        table, history = self._table, self._table.history
        found = place_pages(
            pages.contiguous(),
            self._frame_of,
            table.slot_of[layer],
            table.page_in[layer],
            history.last_reads[layer],
            history.choices_then[layer],
            self._now,
            self._order[layer],
            self._count,
            self._totals,
            is_chosen=is_chosen,
        )
        return *found, self._count

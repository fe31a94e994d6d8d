"""Which page is in which slot of each layer, and which page leaves for another: residency, without any KV.

``PageSlots`` moves keys and values by it, and the laboratory's replays count what it would have moved.
"""

from __future__ import annotations

import torch

from sgl_importance_kernels.sparse.page_history import PageHistory
from sgl_importance_kernels.sparse.slot_loops import find_slots, give_slots


class SlotTable:
    """Slots of every layer. Those before ``first_slot`` are not its own: they are never given nor taken.

    Args:
        history: of reads; says what pages in slots are worth.
        num_layers: layers, each with slots of its own.
        num_pages: logical pages.
        num_slots: slots of a layer, the first ones included.
        first_slot: the first that a page may get.
        device: where the tables are.

    Attributes:
        now: number of the pass.
    """

    def __init__(
        self,
        history: PageHistory,
        num_layers: int,
        num_pages: int,
        num_slots: int,
        first_slot: int,
        device: torch.device | str,
    ) -> None:
        self.history = history
        self.first_slot = first_slot
        self.slot_of = torch.full((num_layers, num_pages), -1, dtype=torch.int32, device=device)
        self.page_in = torch.full((num_layers, num_slots), -1, dtype=torch.int32, device=device)
        self.now = 0

    @property
    def num_bytes(self) -> int:
        """Device bytes, the history's included."""
        return self.slot_of.nbytes + self.page_in.nbytes + self.history.num_bytes

    def begin_pass(self) -> None:
        """A forward pass begins: what it reads keeps its slot until it ends."""
        self.now += 1

    def read(
        self, layer: int, pages: torch.Tensor, elsewhere: torch.Tensor, *, is_chosen: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pages are read now, and those without a slot get one, as far as there are any for them. On a CPU:
        under Triton ``DeviceTable`` does it.

        Args:
            layer: index among the layers.
            pages: of one request or of many, int64 [pages]; -1 for none, and one that several read, several
                times.
            elsewhere: where pages are that have no slot and need none, -1 of the others; int64 [pages].
            is_chosen: whether a selector chose them.

        Returns:
            Slots of the pages, -1 of those without one, int64 [pages]; then what ``give`` returns for those
            that had none.
        """
        self.history.read(layer, pages, self.now, is_chosen=is_chosen)
        slots, missing = torch.empty_like(pages), torch.empty_like(pages)
        arrays = pages.numpy(), elsewhere.numpy(), self.slot_of[layer].numpy(), slots.numpy()
        count = find_slots(*arrays, missing.numpy())
        brought, slots_given = self.give(layer, missing[:count], is_chosen=is_chosen)
        if len(brought):
            find_slots(*arrays, torch.empty_like(pages).numpy())  # what is left of them is nobody's
        return slots, brought, slots_given

    def give(
        self, layer: int, missing: torch.Tensor, *, is_chosen: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives pages that have no slot one, in their order, as far as there are any.

        A page that was chosen takes the slot of the page that is worth least, of those that this pass did not
        read. Where all of a context is read, only pages that the last two passes did not read make room, the
        least recently read first: were others to go, a context longer than the slots would push each page out
        before it comes round again. Page 0, which is padding's, gets none: it takes what goes nowhere.

        Args:
            layer: index among the layers.
            missing: pages that have no slot, each once and above 0, ascending; int64 [pages].
            is_chosen: whether a selector chose them.

        Returns:
            Pages to be brought and the slots that they go to, int64 [at most pages] each.
        """
        slots = torch.empty_like(missing)
        if not len(missing):
            return missing, slots
        held = self.page_in[layer, self.first_slot :].clamp(min=0)
        last_read = self.history.last_read(layer, held)
        worth = self.history.worth(layer, held, last_read, self.now) if is_chosen else last_read
        stays = last_read >= (self.now if is_chosen else self.now - 1)
        given = give_slots(
            missing.numpy(),
            self.first_slot,
            worth.double().numpy(),
            stays.numpy(),
            self.page_in[layer].numpy(),
            self.slot_of[layer].numpy(),
            slots.numpy(),
        )
        return missing[:given], slots[:given]

    def is_resident(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Whether pages have a slot, bool [pages]."""
        return self.slot_of[layer, pages] >= 0

    def choices(self, pages: torch.Tensor) -> torch.Tensor:
        """How often pages were chosen of late in each layer; float32 [layers, pages]."""
        return self.history.choices(pages, self.now)

    def free(self, pages: torch.Tensor) -> None:
        """Takes pages out of their slots, in every layer."""
        slots = self.slot_of[:, pages].long()
        layers, columns = (slots >= 0).nonzero(as_tuple=True)
        self.page_in[layers, slots[layers, columns]] = -1
        self.slot_of[:, pages] = -1

    def free_where(self, pages: torch.Tensor, is_freed: torch.Tensor) -> None:
        """As ``free`` of those pages that ``is_freed`` says, bool [pages]; nothing waits for the device."""
        known = pages.clamp(min=0)
        slots = self.slot_of[:, known]
        is_taken_out = is_freed & (slots >= 0)
        self.slot_of[:, known] = torch.where(is_taken_out, -1, slots)
        # A slot is one page's: what is added to it makes -1 of the page's number, and nothing of any other.
        self.page_in.scatter_add_(
            1, slots.clamp(min=0).long(), torch.where(is_taken_out, -1 - known, 0).to(self.page_in.dtype)
        )

    def forget(self, pages: torch.Tensor) -> None:
        """As ``free``, and their numbers go to other pages."""
        self.free(pages)
        self.history.forget(pages)

    def clear(self) -> None:
        """Forgets every page."""
        self.slot_of.fill_(-1)
        self.page_in.fill_(-1)
        self.history.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError unless both tables say the same."""
        assert not bool((self.page_in[:, : self.first_slot] >= 0).any()), "a frame is used as a slot"
        for layer in range(len(self.page_in)):
            slots = (self.page_in[layer] >= 0).nonzero().flatten()
            pages = self.page_in[layer, slots].long()
            assert torch.equal(self.slot_of[layer, pages].long(), slots)
            assert int((self.slot_of[layer] >= 0).sum()) == len(slots)

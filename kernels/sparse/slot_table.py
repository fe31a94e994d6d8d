"""Which page is in which slot of each layer, and which page leaves for another: residency, without any KV.

``PageSlots`` moves keys and values by it, and the laboratory's replays count what it would have moved.
"""

from __future__ import annotations

import torch

from sgl_importance_kernels.sparse.page_history import PageHistory

_STAYS = 2**33  # above every rank


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
        """Pages are read now, and those without a slot get one, as far as there are any for them.

        No shape depends on what a tensor holds: nothing waits for the device.

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
        known = pages.clamp(min=0)
        slots = torch.where(elsewhere >= 0, elsewhere, self.slot_of[layer, known].long())
        is_missing = slots < 0
        absent = torch.where(is_missing, pages, -1)
        brought, slots_given = self.give(layer, absent, is_chosen=is_chosen)
        slots = torch.where(is_missing, self.slot_of[layer, known].long(), slots)
        return torch.where(pages > 0, slots, -1), brought, slots_given

    def give(self, layer: int, pages: torch.Tensor, *, is_chosen: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives pages that have no slot one, in the order of their numbers, as far as there are any.

        A page that was chosen takes the slot of the page that is worth least, of those that this pass did not
        read. Where all of a context is read, only pages that the last two passes did not read make room, the
        least recently read first: were others to go, a context longer than the slots would push each page out
        before it comes round again. Page 0, which is padding's, gets none: it takes what goes nowhere.

        Args:
            layer: index among the layers.
            pages: int64 [pages]; some may stand there several times, and -1 for none.
            is_chosen: whether a selector chose them.

        Returns:
            Pages to be brought and the slots that they go to, int64 [at most pages] each, -1 for none.
        """
        none = self.slot_of.shape[1]
        absent = torch.where(pages > 0, pages, none).sort().values
        is_first = absent < none
        is_first[1:] &= absent[1:] != absent[:-1]
        num_given = min(len(pages), self.page_in.shape[1] - self.first_slot)
        order = is_first.cumsum(0) - 1
        brought = torch.full((num_given + 1,), -1, dtype=torch.int64, device=pages.device)
        brought[torch.where(is_first & (order < num_given), order, num_given)] = absent
        brought = brought[:num_given]

        slots_given, may_be_given = self._victims(layer, num_given, is_chosen=is_chosen)
        is_given = (brought >= 0) & may_be_given
        brought = torch.where(is_given, brought, -1)

        left = self.page_in[layer, slots_given].long()
        self.slot_of[layer, torch.where(is_given, left, 0).clamp(min=0)] = -1
        self.slot_of[layer, brought.clamp(min=0)] = torch.where(is_given, slots_given, -1).int()
        self.page_in[layer, slots_given] = torch.where(is_given, brought, left).int()
        return brought, torch.where(is_given, slots_given, -1)

    def _victims(self, layer: int, count: int, *, is_chosen: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The first ``count`` of a layer's slots as they are given, the free ones first, int64 [count]; and
        whether each may be, bool [count]. Of slots that are worth the same the first goes first."""
        held = self.page_in[layer, self.first_slot :]
        is_free = held < 0
        held = held.clamp(min=0)
        last_read = self.history.last_read(layer, held)
        worth = self.history.worth(layer, held, self.now) if is_chosen else last_read
        stays = last_read >= (self.now if is_chosen else self.now - 1)
        rank = _ranks(worth).masked_fill_(stays, _STAYS).masked_fill_(is_free, 0)
        # No two alike: the same slots on every device, found without all of them being sorted.
        by_slot = rank * len(held) + torch.arange(len(held), device=held.device)
        first = by_slot.topk(count, largest=False, sorted=True)
        return first.indices + self.first_slot, first.values < _STAYS * len(held)

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


def _ranks(worth: torch.Tensor) -> torch.Tensor:
    """Whole numbers from 1 on, below ``_STAYS``, in the order of int32 or float32 numbers; int64."""
    if worth.is_floating_point():
        bits = worth.view(torch.int32)
        worth = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats grow with their bits the other way
    return worth.long() + (2**31 + 1)

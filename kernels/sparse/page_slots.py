"""Pages of every layer in two tiers: all complete ones on the host, some of them in slots on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sgl_importance_kernels.sparse.late_counts import LateCounts
from sgl_importance_kernels.sparse.open_pages import OpenPages, StepPlan, WritePlan
from sgl_importance_kernels.sparse.page_history import PageHistory
from sgl_importance_kernels.sparse.representations import Representations
from sgl_importance_kernels.sparse.selectors.selector import Selector
from sgl_importance_kernels.sparse.slot_table import SlotTable
from sgl_importance_kernels.sparse.traffic import PageTraffic

if TYPE_CHECKING:
    from sgl_importance_kernels.sparse.triton.device_table import DeviceTable


class PageSlots:
    """Keeps pages by their logical number, so that requests which share a prefix share slots.

    The page that a request fills is in a frame, and on the host when it is complete. Frames are the first
    slots of every layer; each of the others is free or holds a copy of a host page.

    Args:
        host_keys: of each layer, [tokens, KV heads, head dimension] by location in the pool.
        host_values: likewise.
        num_frames: slots for open pages, one for each request that may run.
        num_slots: all slots of a layer, frames included.
        page_size: tokens per page; divides the tokens of the pool.
        staging_pages: pages that one partial attention reads, through room that all layers share.
        device: where slots, staging and tables are.
        selector: what is kept of pages beside, so that queries can choose among them; None for nothing.
        uses_triton: whether Triton moves and scans pages. A CUDA device needs it, and pinned host buffers.
    """

    def __init__(
        self,
        host_keys: Sequence[torch.Tensor],
        host_values: Sequence[torch.Tensor],
        *,
        num_frames: int,
        num_slots: int,
        page_size: int,
        staging_pages: int,
        device: torch.device | str,
        selector: Selector | None = None,
        uses_triton: bool = False,
    ) -> None:
        assert uses_triton or torch.device(device).type == "cpu", device
        assert 0 < num_frames <= num_slots, (num_frames, num_slots)
        num_layers, (tokens, heads, key_dim) = len(host_keys), host_keys[0].shape
        value_dim = host_values[0].shape[-1]
        dtype, page_shape = host_keys[0].dtype, (page_size, heads)
        # Others are multiplied as they stand only where their scales are known.
        assert dtype in (torch.float32, torch.bfloat16, torch.float16), f"quantized keys: {dtype}"
        assert tokens % page_size == 0, (tokens, page_size)
        self.page_size = page_size
        self.num_frames, self.num_slots, self.num_pages = num_frames, num_slots, tokens // page_size
        self.host = tuple(
            (_by_page(keys, page_size), _by_page(values, page_size))
            for keys, values in zip(host_keys, host_values, strict=True)
        )
        self.keys, self.values = (
            torch.zeros(num_layers, num_slots, *page_shape, dim, dtype=dtype, device=device)
            for dim in (key_dim, value_dim)
        )
        self.staging_pages = staging_pages
        self._staging = tuple(
            torch.zeros(staging_pages, *page_shape, dim, dtype=dtype, device=device)
            for dim in (key_dim, value_dim)
        )
        self.representations = (
            None
            if selector is None
            else Representations(
                selector, tuple(keys for keys, _ in self.host), device, uses_triton=uses_triton
            )
        )
        self.uses_triton = uses_triton
        self.open_pages = OpenPages(num_frames, self.num_pages, page_size, device)
        history = PageHistory(num_layers, self.num_pages, device)
        self.table = SlotTable(history, num_layers, self.num_pages, num_slots, num_frames, device)
        self.traffic = PageTraffic()
        self.late = LateCounts(2, device)
        self.arrivals = torch.zeros(
            num_frames * heads if uses_triton else 0, dtype=torch.int32, device=device
        )
        self._on_device = self._device_table() if uses_triton else None

    def _device_table(self) -> DeviceTable:
        from sgl_importance_kernels.sparse.triton.device_table import DeviceTable  # a CPU needs no Triton

        return DeviceTable(self.table, self.open_pages.frame_of, self.late.sums)

    @property
    def page_bytes(self) -> int:
        """Keys and values of one page of one layer."""
        return (self.keys.nbytes + self.values.nbytes) // (len(self.host) * self.num_slots)

    def device_bytes(self) -> dict[str, int]:
        """What is on the device, in bytes by purpose."""
        representations = 0 if self.representations is None else self.representations.num_bytes
        return {
            "slots": self.keys.nbytes + self.values.nbytes,
            "staging": sum(buffer.nbytes for buffer in self._staging),
            "tables": self.table.num_bytes
            + self.open_pages.num_bytes
            + (self._on_device.num_bytes + self.arrivals.nbytes if self._on_device else 0),
            **({"representations": representations} if representations else {}),
        }

    def begin_pass(self, locations: torch.Tensor) -> WritePlan:
        """Decides where the new tokens of a forward pass go, before its first layer.

        Args:
            locations: in the pool, int64 [tokens]; those of a page are consecutive and ascend.
        """
        self._begin()
        plan = self.open_pages.plan(locations)
        # What a slot holds of a page that goes on would fall behind its frame.
        self.table.free(plan.reopened)
        self._begin_on_device()
        return plan

    def begin_step(self, locations: torch.Tensor, completed: Sequence[int]) -> StepPlan:
        """As ``begin_pass`` where each request has one new token and Triton writes it; nothing waits.

        Args:
            locations: int64 [rows], 0 for padding.
            completed: rows whose token is the last of its page.
        """
        assert self.uses_triton
        self._begin()
        plan = self.open_pages.plan_step(locations, completed)
        self.traffic.written += len(completed) * len(self.host)
        self.table.free_where(plan.pages, plan.is_reopened)
        self._begin_on_device()
        return plan

    def _begin(self) -> None:
        """Represents the pages that the step before completed: not in its layers, which a graph replays."""
        self.table.begin_pass()
        completed = self.open_pages.close_completed()
        if completed is not None and self.representations is not None:
            pages, frames = completed
            self.representations.build_from_frames(self.keys, frames, pages)

    def _begin_on_device(self) -> None:
        if self._on_device is not None:
            self._on_device.begin_pass()
            self.settle(waits=False)

    def write_step(self, layer: int, plan: StepPlan, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Takes the keys and values of a step's tokens, each [rows, KV heads, head dimension]."""
        from sgl_importance_kernels.sparse.triton.write_kernel import write_tokens  # a CPU needs no Triton

        write_tokens(
            (keys.contiguous(), values.contiguous()),
            (self.keys[layer], self.values[layer]),
            self.host[layer],
            plan.pages,
            plan.offsets,
            plan.frames,
            plan.is_reopened,
        )

    def write(self, layer: int, plan: WritePlan, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Takes the keys and values of a pass's new tokens, each [tokens, KV heads, head dimension]."""
        for new, slots, host in (
            (keys, self.keys[layer], self.host[layer][0]),
            (values, self.values[layer], self.host[layer][1]),
        ):
            if len(plan.whole):
                whole = new[plan.to_host].unflatten(0, (len(plan.whole), self.page_size))
                self._copy(whole, _all_of(plan.whole), host, plan.whole)
            self._copy(host, plan.reopened, slots, plan.reopened_frames)
            if len(plan.to_frames):
                slots.flatten(0, 1)[plan.frame_locations] = new[plan.to_frames]
            self._copy(slots, plan.completed_frames, host, plan.completed)
        if self.representations is not None:
            if len(plan.whole):
                whole = keys[plan.to_host].unflatten(0, (len(plan.whole), self.page_size))
                self.representations.build(layer, plan.whole, whole)
            if len(plan.completed):
                self.representations.build(layer, plan.completed, self.keys[layer, plan.completed_frames])
        self.traffic.written += len(plan.whole) + len(plan.completed)

    def place(self, layer: int, pages: torch.Tensor, *, is_chosen: bool = False) -> torch.Tensor:
        """Makes pages readable: those without a slot are brought from the host, as far as slots may be given.

        The others are read where they lie, on the host. Who makes room is said in ``SlotTable.read``; under
        Triton in ``DeviceTable``, and nothing waits for the device.

        Args:
            layer: index among the pool's layers.
            pages: of one request or of many, int64 of any shape; -1 for none.
            is_chosen: whether a selector chose them; else they are all of their contexts, or a part of all.

        Returns:
            Places, int64 likewise: a slot, or behind all slots, a page of the host; -1 for none. They hold
            until the next call.
        """
        if self._on_device is not None:
            from sgl_importance_kernels.sparse.triton.copy_kernel import bring_pages  # a CPU needs no Triton

            places, *copies = self._on_device.place(layer, pages, is_chosen=is_chosen)
            bring_pages(self.host[layer], (self.keys[layer], self.values[layer]), *copies)
            return places
        flat = pages.flatten()
        frames = self.open_pages.frame_of[flat]  # of -1 some page's, and nobody looks at it
        slots, brought, slots_given = self.table.read(layer, flat, frames, is_chosen=is_chosen)
        is_page = flat >= 0
        is_staying = is_page & (slots < 0)
        self.traffic.read += int(is_page.sum())
        self.traffic.add_loads(len(brought) + int(is_staying.sum()), self.page_bytes)
        if len(brought):
            with self.traffic.waiting():
                for host, kept in zip(self.host[layer], (self.keys[layer], self.values[layer]), strict=True):
                    kept[slots_given] = host[brought]
        return torch.where(is_staying, flat + self.num_slots, slots).view_as(pages)

    def settle(self, *, waits: bool = True) -> None:
        """Adds to the traffic what was read since the last call; without waiting, what has arrived."""
        read, loaded = self.late.take_all() if waits else self.late.take()
        self.traffic.read += read
        self.traffic.add_loads(loaded, self.page_bytes)

    def read(
        self, layer: int, pages: torch.Tensor, *, is_chosen: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Brings pages into the staging buffer, from their slots or from the host; ``place`` says the rest.

        Args:
            layer: index among the pool's layers.
            pages: int64 [pages], at most as many as the staging buffer holds.
            is_chosen: as in ``place``.

        Returns:
            Keys and values, [pages * page_size, KV heads, head dimension] each, in the order of ``pages``;
            they are overwritten by the next call.
        """
        places = self.place(layer, pages, is_chosen=is_chosen)
        is_kept, staged = places < self.num_slots, torch.arange(len(pages), device=places.device)
        kept, on_host = torch.where(is_kept, places, -1), torch.where(is_kept, -1, places - self.num_slots)
        keys, values = (buffer[: len(pages)] for buffer in self._staging)
        for buffer, slots, host in (
            (keys, self.keys[layer], self.host[layer][0]),
            (values, self.values[layer], self.host[layer][1]),
        ):
            self._copy(slots, kept, buffer, staged)
            with self.traffic.waiting():
                self._copy(host, on_host, buffer, staged)
        return keys.flatten(0, 1), values.flatten(0, 1)

    def _copy(
        self,
        source: torch.Tensor,
        source_pages: torch.Tensor,
        target: torch.Tensor,
        target_pages: torch.Tensor,
    ) -> None:
        """Copies pages within or between the tiers; -1 on either side leaves a copy out."""
        if self.uses_triton:
            from sgl_importance_kernels.sparse.triton.copy_kernel import copy_pages  # a CPU needs no Triton

            copy_pages(source, source_pages, target, target_pages)
        elif len(source_pages):
            is_copied = (source_pages >= 0) & (target_pages >= 0)
            target[target_pages[is_copied]] = source[source_pages[is_copied]]

    def arrivals_of(self, rows: int) -> torch.Tensor:
        """Zeros for the programs of ``attend_places``, int32; more rows than frames have only passes in which
        retracted answers come back."""
        needed = rows * self.keys.shape[3]
        if needed <= len(self.arrivals):
            return self.arrivals
        return torch.zeros(needed, dtype=torch.int32, device=self.arrivals.device)

    def is_resident(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Whether pages can be read without the host, bool [pages]."""
        return self.table.is_resident(layer, pages) | (self.open_pages.frame_of[pages] >= 0)

    def choices(self, pages: torch.Tensor) -> torch.Tensor:
        """How often pages were chosen of late in each layer; float32 [layers, pages]."""
        return self.table.choices(pages)

    def flush(self, layer: int, among: torch.Tensor | None = None) -> None:
        """Copies a layer's open pages, or those of them in ``among``, to the host for readers of the pool."""
        pages, frames = self.open_pages.open(among)
        if len(pages):
            for slots, host in zip((self.keys[layer], self.values[layer]), self.host[layer], strict=True):
                self._copy(slots, frames, host, pages)
        if self.keys.is_cuda:  # the caller reads on the host what the device still writes there
            torch.cuda.current_stream(self.keys.device).synchronize()

    def forget(self, pages: torch.Tensor) -> None:
        """Drops what the device holds of pages that were freed, or written on the host by somebody else."""
        self.open_pages.close(pages)
        self.table.forget(pages)
        if self.representations is not None:
            self.representations.forget(pages)

    def clear(self) -> None:
        """Forgets every page."""
        self.open_pages.clear()
        self.table.clear()
        if self.representations is not None:
            self.representations.clear()

    def resident_pages(self) -> torch.Tensor:
        """Pages in slots, frames not counted, by layer; int64 [layers]."""
        return (self.table.page_in >= 0).sum(dim=1)

    def check_integrity(self) -> None:
        """Raises AssertionError unless tables agree and every slot holds what the host holds."""
        self.open_pages.check_integrity()
        if self.representations is not None:
            self.representations.check_integrity()
        self.table.check_integrity()
        for layer, (host_keys, host_values) in enumerate(self.host):
            slots = (self.table.page_in[layer] >= 0).nonzero().flatten()
            pages = self.table.page_in[layer, slots].long().to(host_keys.device)
            assert torch.equal(self.keys[layer, slots].to(host_keys.device), host_keys[pages])
            assert torch.equal(self.values[layer, slots].to(host_values.device), host_values[pages])


def _all_of(pages: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(pages), device=pages.device)


def _by_page(tokens: torch.Tensor, page_size: int) -> torch.Tensor:
    """[tokens, heads, dimension] as [pages, page_size, heads, dimension]; no copy."""
    return tokens.view(-1, page_size, *tokens.shape[1:])

"""sglang's KV pool as the host tier, with page slots on the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sgl_importance.sparse.device_plan import DevicePlan
from sgl_importance_kernels.sparse.open_pages import StepPlan, WritePlan
from sgl_importance_kernels.sparse.page_slots import PageSlots
from sgl_importance_kernels.sparse.selectors.selector import Selector
from sglang_importance.sparse.selections import Selections

if TYPE_CHECKING:
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.prefill_budget import PrefillBudget


class TieredKVPool(MHATokenToKVPool):
    """A pool whose buffers are host memory and hold every complete page by its logical number.

    ``attach_slots`` gives it the device's part. The page that a request fills is there only; who reads
    buffers through this class finds it on the host, too.

    Attributes:
        plan: how the device memory is divided.
        slots: what is on the device.
        selections: which tokens of each request read chosen pages; None where all pages are read.
    """

    plan: DevicePlan
    slots: PageSlots
    selections: Selections | None

    def __init__(self, size: int, *, device: str, **kwargs: Any) -> None:
        super().__init__(size, device="cpu", **kwargs)
        if torch.device(device).type == "cpu":
            return
        # The device reads and writes it: pages that cannot move, of the host's memory.
        assert self.k_buffer is not None
        assert self.v_buffer is not None
        for buffer in (*self.k_buffer, *self.v_buffer):
            _pin(buffer)

    def attach_slots(
        self,
        plan: DevicePlan,
        device: torch.device | str,
        selector: Selector | None = None,
        selections: Selections | None = None,
        *,
        uses_triton: bool = False,
    ) -> None:
        """Allocates what ``plan`` says, once, before the first request."""
        assert self.k_buffer is not None
        assert self.v_buffer is not None
        self.plan, self.selections = plan, selections
        self.slots = PageSlots(
            self.k_buffer,
            self.v_buffer,
            num_frames=plan.num_frames,
            num_slots=plan.num_slots,
            page_size=self.page_size,
            staging_pages=plan.staging_pages,
            device=device,
            selector=selector,
            uses_triton=uses_triton,
        )
        taken = self.slots.device_bytes()
        assert taken == plan.bytes_by_purpose, f"the plan says {plan.bytes_by_purpose}, taken are {taken}"
        self._locations: torch.Tensor | None = None
        self._write_plan: WritePlan | StepPlan | None = None

    def begin_pass(self, locations: torch.Tensor) -> None:
        """Decides where the new tokens of a forward pass go, before its first layer.

        Args:
            locations: of the new tokens, int64 [tokens].
        """
        self._locations, self._write_plan = locations, self.slots.begin_pass(locations)

    def begin_step(self, locations: torch.Tensor, lengths: Sequence[int]) -> StepPlan | None:
        """As ``begin_pass``, of a step with one new token for each request.

        Args:
            locations: of the new tokens, int64 [requests].
            lengths: tokens of each request, the new one included.

        Returns:
            What the step's layers write by, where Triton does.
        """
        if not self.slots.uses_triton:
            self.begin_pass(locations)
            return None
        completed = [row for row, length in enumerate(lengths) if length % self.page_size == 0]
        plan = self.slots.begin_step(locations, completed)
        self._locations, self._write_plan = locations, plan
        return plan

    def _store_kv_layer(
        self, layer_idx: int, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor
    ) -> None:
        assert loc is self._locations, "a pass writes what it did not announce"
        assert self._write_plan is not None
        if isinstance(self._write_plan, StepPlan):
            self.slots.write_step(layer_idx, self._write_plan, cache_k, cache_v)
        else:
            self.slots.write(layer_idx, self._write_plan, cache_k, cache_v)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        self.slots.flush(layer_id - self.start_layer)
        keys: torch.Tensor = super().get_key_buffer(layer_id)
        return keys

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        self.slots.flush(layer_id - self.start_layer)
        values: torch.Tensor = super().get_value_buffer(layer_id)
        return values


def _pin(buffer: torch.Tensor) -> None:
    """Pins host memory where it is.

    ``Tensor.pin_memory`` would copy it into up to twice as many bytes: its allocator takes powers of two.
    """
    status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
    if int(status):
        raise RuntimeError(
            f"{buffer.nbytes / 2**30:.1f} GiB of host memory for tiered pages could not be pinned (CUDA "
            f"error {int(status)}): use a smaller --max-total-tokens, or raise the limit of locked memory "
            "(ulimit -l)"
        )
    # Or the next memory at this address could neither be pinned nor copied from.
    weakref.finalize(buffer, torch.cuda.cudart().cudaHostUnregister, buffer.data_ptr()).atexit = False


def forget_freed_pages(allocator: PagedTokenToKVPoolAllocator, slots: PageSlots) -> None:
    """Makes an allocator tell the device of every page that it takes back.

    Each way of freeing ends in ``_release_page_ids`` (mem_cache/allocator/paged.py).
    """
    release: Callable[..., None] = allocator._release_page_ids
    clear: Callable[[], None] = allocator.clear

    def release_and_forget(*page_ids: torch.Tensor) -> None:
        for pages in page_ids:
            # Scores of a request that has finished are computed behind its answer, from keys on the host: the
            # page that it was filling must be there. Nobody takes scores beside Triton.
            if not slots.uses_triton:
                for layer in range(len(slots.host)):
                    slots.flush(layer, pages)
            slots.forget(pages)
        release(*page_ids)

    def clear_all() -> None:
        slots.clear()
        clear()

    allocator._release_page_ids = release_and_forget  # type: ignore[method-assign]  # on this instance
    allocator.clear = clear_all  # type: ignore[method-assign]


def continue_by_whole_pages(allocator: PagedTokenToKVPoolAllocator) -> None:
    """Makes every chunk of a prompt but the last end with a page, also where memory is short.

    Upstream then cuts a chunk to the tokens that it expects to be left (mem_cache/prefill_budget.py,
    ``available_chunk_tokens``), within a page. The next chunk would complete that page and begin another: two
    frames of one request, and there is one for each.
    """
    create: Callable[..., PrefillBudget] = allocator.create_prefill_budget

    def create_by_pages(*args: Any, **kwargs: Any) -> PrefillBudget:
        budget = create(*args, **kwargs)
        available = budget.available_chunk_tokens

        def whole_pages(chunk_limit: int) -> int | None:
            tokens = available(chunk_limit)
            # The page is allocated whole in any case.
            return None if tokens is None else budget.ceil_paged_tokens(tokens)

        budget.available_chunk_tokens = whole_pages  # type: ignore[method-assign]  # on this instance
        return budget

    allocator.create_prefill_budget = create_by_pages  # type: ignore[method-assign]  # on this instance

"""A prefill leaves room to whoever decodes in the same step, and nobody passes a chunk that waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from sglang_importance.scheduler.chunk_room import HOOKS

from support.window_pool import windows_allocator

PAGE_SIZE, PAGES, DECODING = 16, 20, 4
CREATE = "create_prefill_budget"


class EmptyTree:
    """Holds nothing that could be evicted."""

    sliding_window_size = 2 * PAGE_SIZE

    def supports_mamba(self) -> bool:
        return False

    def evictable_size(self) -> int:
        return 0

    full_evictable_size = swa_evictable_size = evictable_size

    def can_free(self, tokens: int) -> bool:
        return True


def _around(function: Callable[..., Any]) -> Callable[..., Any]:
    (hook,) = {hook for name, (hook, _) in HOOKS.items() if name.endswith(f".{function.__qualname__}")}
    return lambda *args, **kwargs: hook(function, *args, **kwargs)


def _empty() -> PagedTokenToKVPoolAllocator:
    tokens = PAGES * PAGE_SIZE
    return PagedTokenToKVPoolAllocator(tokens, PAGE_SIZE, torch.float32, "cpu", kvcache=None, need_sort=True)


@pytest.mark.parametrize(("is_ours", "fits"), [(False, False), (True, True)], ids=["sglang's", "ours"])
def test_who_decodes_can_begin_a_page(monkeypatch: pytest.MonkeyPatch, is_ours: bool, fits: bool) -> None:
    create = getattr(BaseTokenToKVPoolAllocator, CREATE)
    monkeypatch.setattr(BaseTokenToKVPoolAllocator, CREATE, _around(create) if is_ours else create)
    allocator = _empty()
    last = [allocator.alloc(PAGE_SIZE)[-1] for _ in range(DECODING)]  # whose pages are full
    budget = allocator.create_prefill_budget(EmptyTree(), num_mixed_decode_tokens=DECODING)
    chunk = budget.remaining_current // PAGE_SIZE * PAGE_SIZE
    assert allocator.alloc(chunk) is not None
    after = torch.full((DECODING,), PAGE_SIZE + 1)
    assert (allocator.alloc_decode(after, after, torch.stack(last)) is not None) == fits


@pytest.mark.parametrize(("is_ours", "fits"), [(False, False), (True, True)], ids=["sglang's", "ours"])
@pytest.mark.parametrize("scarce", ["full", "windows"])
def test_who_decodes_can_begin_a_page_of_windows(
    monkeypatch: pytest.MonkeyPatch, is_ours: bool, fits: bool, scarce: str
) -> None:
    create = getattr(SWATokenToKVPoolAllocator, CREATE)
    monkeypatch.setattr(SWATokenToKVPoolAllocator, CREATE, _around(create) if is_ours else create)
    tokens = PAGES * PAGE_SIZE
    full, windows = (tokens, 2 * tokens) if scarce == "full" else (2 * tokens, tokens)
    allocator = windows_allocator(full, windows, PAGE_SIZE)

    def extend(requests: int, tokens: int) -> torch.Tensor | None:
        before, after = torch.zeros(requests, dtype=torch.int64), torch.full((requests,), tokens)
        return allocator.alloc_extend(before, before, after, after, before - 1, requests * tokens)

    last = extend(DECODING, PAGE_SIZE)[PAGE_SIZE - 1 :: PAGE_SIZE]  # whose pages are full
    budget = allocator.create_prefill_budget(EmptyTree(), num_mixed_decode_tokens=DECODING)
    chunk = min(budget.remaining_current, budget.remaining_swa) // PAGE_SIZE * PAGE_SIZE
    assert extend(1, chunk) is not None
    after = torch.full((DECODING,), PAGE_SIZE + 1)
    assert (allocator.alloc_decode(after, after, last) is not None) == fits


def test_windows_that_are_counted_in_requests_need_no_room_for_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = windows_allocator(PAGES * PAGE_SIZE, PAGES * PAGE_SIZE, PAGE_SIZE)
    monkeypatch.setattr(allocator, "_swa_req_ring", True)
    create = SWATokenToKVPoolAllocator.create_prefill_budget
    ours = _around(create)(allocator, EmptyTree(), num_mixed_decode_tokens=DECODING)
    assert ours.swa_offset == create(allocator, EmptyTree(), num_mixed_decode_tokens=DECODING).swa_offset


def test_nobody_passes_a_chunk_that_waits() -> None:
    """Not even where room comes back in the same pass, as by a preemption."""
    allocator = _empty()
    budget = allocator.create_prefill_budget(EmptyTree())
    taken = allocator.alloc(PAGES * PAGE_SIZE)
    assert _around(PrefillBudget.available_chunk_tokens)(budget, 4 * PAGE_SIZE) is None
    allocator.free(taken)
    asked = {"extend_input_len": 1, "total_tokens": 2 + PAGE_SIZE, "max_new_tokens": 1, "input_tokens": 1}
    assert budget.check_prefill(**asked, swa_host_hit_length=0, chunk_limit=None) == (False, None)
    afterwards = allocator.create_prefill_budget(EmptyTree())
    assert afterwards.check_prefill(**asked, swa_host_hit_length=0, chunk_limit=None) == (True, None)

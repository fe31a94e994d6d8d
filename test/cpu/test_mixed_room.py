"""A prefill beside requests that decode in the same step leaves each room to begin a page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from sglang_importance.cache.chunk_room import HOOKS

PAGE_SIZE, PAGES, DECODING = 16, 20, 4
CREATE = "create_prefill_budget"


class EmptyTree:
    """Holds nothing that could be evicted."""

    def supports_mamba(self) -> bool:
        return False

    def evictable_size(self) -> int:
        return 0


def _around(create: Callable[..., Any]) -> Callable[..., Any]:
    (hook,) = (hook for name, (hook, _) in HOOKS.items() if name.endswith(f".{CREATE}"))
    return lambda *args, **kwargs: hook(create, *args, **kwargs)


@pytest.mark.parametrize(("is_ours", "fits"), [(False, False), (True, True)], ids=["sglang's", "ours"])
def test_who_decodes_can_begin_a_page(monkeypatch: pytest.MonkeyPatch, is_ours: bool, fits: bool) -> None:
    create = getattr(BaseTokenToKVPoolAllocator, CREATE)
    monkeypatch.setattr(BaseTokenToKVPoolAllocator, CREATE, _around(create) if is_ours else create)
    allocator = PagedTokenToKVPoolAllocator(
        PAGES * PAGE_SIZE, PAGE_SIZE, torch.float32, "cpu", kvcache=None, need_sort=True
    )
    last = [allocator.alloc(PAGE_SIZE)[-1] for _ in range(DECODING)]  # whose pages are full
    budget = allocator.create_prefill_budget(EmptyTree(), num_mixed_decode_tokens=DECODING)
    chunk = budget.remaining_current // PAGE_SIZE * PAGE_SIZE
    assert allocator.alloc(chunk) is not None
    after = torch.full((DECODING,), PAGE_SIZE + 1)
    assert (allocator.alloc_decode(after, after, torch.stack(last)) is not None) == fits

"""A pool of one layer of full attention and one of sliding windows, on the CPU."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool


def windows_allocator(full: int, windows: int, page_size: int) -> SWATokenToKVPoolAllocator:
    """Of so many tokens in either."""
    pool = SWAKVPool(
        full,
        windows,
        page_size,
        torch.float32,
        head_num=1,
        head_dim=1,
        swa_attention_layer_ids=[1],
        full_attention_layer_ids=[0],
        device="cpu",
        enable_memory_saver=False,
        enable_alt_stream=False,
    )
    return SWATokenToKVPoolAllocator(full, windows, page_size, torch.float32, "cpu", pool, need_sort=False)

"""A plugin for benchmarks: copies from the host take as long as they would over a slower link.

After each copy the scheduler sleeps for what the bytes would take, for tiered pages and for HiCache alike;
what goes to the host is not slowed down. Found by sglang through the dist-info in its folder, where
PYTHONPATH names it; no part of the package.
"""

from __future__ import annotations

import os
import time
from typing import Any

BYTES_PER_SECOND = "SLOW_COPIES_BYTES_PER_SECOND"


def _rate() -> float:
    return float(os.environ[BYTES_PER_SECOND])


def place_slowly(place: Any, slots: Any, *args: Any, **kwargs: Any) -> Any:
    traffic = slots.traffic
    before = traffic.loaded_bytes
    result = place(slots, *args, **kwargs)
    if waits := (traffic.loaded_bytes - before) / _rate():
        time.sleep(waits)
        traffic.load_seconds += waits
    return result


def load_layer_slowly(
    load: Any, pool: Any, device_pool: Any, host_indices: Any, *args: Any, **kw: Any
) -> Any:
    result = load(pool, device_pool, host_indices, *args, **kw)
    time.sleep(len(host_indices) * pool.size_per_token / pool.layer_num / _rate())
    return result


def register() -> None:
    if BYTES_PER_SECOND not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    pages = "sgl_importance_kernels.sparse.page_slots.PageSlots"
    hicache = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost.load_to_device_per_layer"
    HookRegistry.register(f"{pages}.place", place_slowly, HookType.AROUND)
    HookRegistry.register(hicache, load_layer_slowly, HookType.AROUND)

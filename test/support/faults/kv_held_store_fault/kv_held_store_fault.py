"""A plugin with a disk so slow that no write to storage ends before somebody has waited for room.

Found by sglang through the folder's dist-info, where PYTHONPATH names the folder; no part of the package.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

WAITS = 3
_waits = 0


def hold_writes(counts: Any, cache: Any) -> Any:
    writes, loads, sizes, names = counts(cache)
    if sizes and _waits < WAITS:
        hits, prefetches, _, *others = sizes
        sizes = (hits, prefetches, 0, *others)
    return writes, loads, sizes, names


def count_waits(add: Any, adder: Any, *args: Any, **kwargs: Any) -> Any:
    global _waits
    before = len(adder.can_run_list)
    answer = add(adder, *args, **kwargs)
    if len(adder.can_run_list) == before:
        _waits += 1
        logger.info(
            "kv_held_store_fault: wait %d, %d tokens free, %d evictable",
            _waits,
            adder.token_to_kv_pool_allocator.available_size(),
            adder.tree_cache.evictable_size(),
        )
    return answer


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    cache = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
    adder = "sglang.srt.managers.schedule_policy.PrefillAdder"
    HookRegistry.register(f"{cache}._sync_hicache_ready_counts", hold_writes, HookType.AROUND)
    for method in ("add_one_req", "add_chunked_req"):
        HookRegistry.register(f"{adder}.{method}", count_waits, HookType.AROUND)

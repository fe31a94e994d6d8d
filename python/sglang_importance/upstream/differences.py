"""Where the releases of sglang that we run beside differ: found in signatures, never in a number."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


def is_chunk(req: Req, params: InsertParams | None) -> bool:
    """Whether more of the request's prefill is to come behind what was just inserted.

    Releases up to 0.5.21 say so in ``params.chunked``. Later ones insert up to a length: a prefill is at its
    end where that is all that the round set out to compute.
    """
    if params is None:
        return False
    chunked: bool | None = getattr(params, "chunked", None)
    if chunked is not None:
        return chunked
    prefill: Any = req  # whose fields, of later releases, the pinned one does not have
    if req.finished() or prefill.extend_end is None:
        return False
    return bool(prefill.extend_end < len(prefill.full_untruncated_fill_ids))


def release_requests(manager: TokenizerManager, rids: Iterable[str]) -> None:
    """Removes what the tokenizer manager still holds of these requests, as upstream does after a failure."""
    release: Any = manager._release_req_states_on_failure
    if "request_states" in inspect.signature(release).parameters:
        held = manager.rid_to_state
        release({rid: held[rid] for rid in rids if rid in held})
    else:
        release(rids)


def is_believed_stored(cache: UnifiedRadixCache, hashes: Sequence[str]) -> bool:
    """Whether sglang takes pages for stored, or for on their way, where host memory is only a buffer.

    Releases up to 0.5.21 know what is stored, of all pools at once, and their pipeline what is on its way.
    Later ones know both, of each pool.

    Args:
        cache: that has a ``buffer_pipeline``.
        hashes: of the pages.
    """
    from sglang.srt.mem_cache.hicache_storage import PoolName  # which the HTTP process does not need

    beliefs: Any = cache.storage_existence_cache
    if hasattr(beliefs, "pool"):
        return bool(beliefs.pool(PoolName.KV).covered(hashes))
    pipeline: Any = cache.buffer_pipeline
    return bool(beliefs.covers_all(PoolName.KV, hashes, extra_cover=pipeline.inflight_backup_hashes))


def host_pool(
    device_pool: MHATokenToKVPool,
    host_to_device_ratio: float,
    page_size: int,
    layout: str,
    *,
    pin_memory: bool,
    allocator: str = "default",
) -> MHATokenToKVPoolHost:
    """A pool of host memory for the pages of ``device_pool``.

    Args:
        device_pool: whose pages it holds.
        host_to_device_ratio: its size, in sizes of the device pool.
        page_size: tokens of a page.
        layout: of upstream, by name.
        allocator: of upstream, by name.
    """
    from sglang.srt.mem_cache.pool_host.mha import (
        MHATokenToKVPoolHost,
    )  # which the HTTP process does not need

    sizes = (host_to_device_ratio, 0, page_size, layout, pin_memory, "cpu", allocator)
    create: Any = MHATokenToKVPoolHost
    if "buffer_info" not in inspect.signature(create).parameters:
        pool: MHATokenToKVPoolHost = create(device_pool, *sizes)
        return pool
    described: Any = device_pool
    pool = create(
        described.get_device_pool_infos()[0].buffer_info,
        *sizes,
        device_capacity_tokens=device_pool.size,
        start_layer=device_pool.start_layer,
        end_layer=device_pool.end_layer,
    )
    return pool

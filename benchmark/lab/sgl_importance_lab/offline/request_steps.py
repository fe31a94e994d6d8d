"""What a scheduler asks of its cache for one request, in replays that have no scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import MatchResult
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


def matched_slots(cache: UnifiedRadixCache, match: MatchResult) -> torch.Tensor:
    """Slots of the KV pool that a match found on the device. shape: [tokens]; dtype int64."""
    found: Any = match
    if hasattr(found, "device_indices"):
        slots: torch.Tensor = found.device_indices
        return slots
    read: Any = cache
    slots = read.path_device_indices(found.last_device_node)[: found.device_prefix_len]
    return slots


def lock_match(cache: UnifiedRadixCache, request: Any) -> None:
    """Locks the path to the request's ``last_node``; ``release`` gives it back."""
    locking: Any = cache
    if hasattr(locking, "lock"):
        request.lock = locking.lock(request.last_node)
    else:
        request.lock_receipt = locking.inc_lock_ref(request.last_node).to_dec_params()


def insert_unfinished(cache: UnifiedRadixCache, request: Any, *, up_to: int, is_chunk: bool) -> None:
    """Inserts what a running request has computed; its lock moves to the end of that.

    Args:
        up_to: tokens that have KV.
        is_chunk: whether more of the prompt is to come.
    """
    inserting: Any = cache
    if hasattr(inserting, "checkpoint"):
        inserting.checkpoint(request, up_to=up_to)
    else:
        inserting.cache_unfinished_req(request, chunked=is_chunk)


def insert_finished(cache: UnifiedRadixCache, request: Any, *, up_to: int) -> None:
    """Inserts a finished request's tokens, as many as have KV."""
    inserting: Any = cache
    insert = inserting.checkpoint if hasattr(inserting, "checkpoint") else inserting.insert_req
    insert(request, up_to=up_to)


def release(cache: UnifiedRadixCache, request: Any, *, inserted: bool) -> None:
    """Gives up the request's lock and its place in the cache."""
    releasing: Any = cache
    if hasattr(releasing, "checkpoint"):
        releasing.unlock(request.lock)
        request.lock = None
        releasing.on_release(request, checkpointed=inserted)
    else:
        releasing.unpin(request)
        releasing.on_release(request, inserted=inserted)

"""A prompt or its next chunk takes no more room than there is, and leaves some to who decodes beside it.

Between two chunks room can be lost that was counted on when the prompt was admitted: copies to lower tiers
lock pages that could be evicted. sglang then goes on with a whole chunk and ends with "Prefill out of
memory" (0.5.21 to 0.5.23, ``PrefillBudget.available_chunk_tokens``). Here the chunk gets shorter or waits,
as sglang's own do where the model has a sliding window.

It ends so, too, where an eviction returns less than counts as evictable (``ImportanceRadixCache.can_free``).
There the eviction comes before the prompt or chunk is admitted, which waits where it fell short.

With mixed chunks the running requests decode in the same step, and each may begin a page; sglang leaves room
for a token each, and ends with "Decode out of memory".

A prompt that fills the pool but for less than a page passes sglang's check of lengths, never finds the page
that each request keeps free, and is waited for by all behind it: it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from sgl_importance.misses.reason import NeededBy
from sglang_importance.upstream.hooks import Hook, HookType

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.mem_cache.prefill_budget import PrefillBudget


_ALL = 1 << 40
"""More tokens than any pool has."""


def _within_room(
    available_chunk_tokens: Callable[[PrefillBudget, int], int | None],
    budget: PrefillBudget,
    chunk_limit: int,
) -> int | None:
    tokens = available_chunk_tokens(budget, chunk_limit)
    if tokens is None:
        return None
    page = budget.page_size
    room: int = max(0, int(budget.remaining_current))
    before = int(budget.current_offset)  # what others of the same step take
    if not budget.tree_cache.can_free(before + min(tokens, room)):
        room = max(0, budget.allocator.available_size() - before)
    room = room // page * page
    if not room:  # It waits, and no other prompt may pass it: sglang would count a chunk that has not run.
        budget.total_offset += _ALL
        return None
    return min(tokens, room)


def _where_it_fits(
    select: Callable[..., Any],
    adder: PrefillAdder,
    request: Req,
    *,
    host_hit_length: int,
    swa_host_hit_length: int,
    **facts: Any,
) -> Any:
    from sglang.srt.managers.schedule_policy import AddReqResult

    found = {"host_hit_length": host_hit_length, "swa_host_hit_length": swa_host_hit_length}
    admission = select(adder, request, **found, **facts)
    if isinstance(admission, AddReqResult):
        return admission
    budget, cache = adder.memory_budget, cast(Any, adder.tree_cache)
    tokens = budget.ceil_paged_tokens(admission.extend_len) + adder.per_req_token_overhead
    on_host = cache.inc_host_lock_ref(request.best_match_node).to_dec_params() if host_hit_length else None
    try:
        with cache.making_room(NeededBy.PREFILL, request):
            fits = cache.can_free(
                int(budget.current_offset) + tokens,
                loaded_back=host_hit_length,
                loaded_windows=swa_host_hit_length,
            )
    finally:
        if on_host is not None:
            cache.dec_host_lock_ref(request.best_match_node, on_host)
    return admission if fits else AddReqResult.NO_TOKEN


def _with_begun_pages(create: Callable[..., PrefillBudget], allocator: Any, *args: Any, **kwargs: Any) -> Any:
    tokens = kwargs.get("num_mixed_decode_tokens", 0) * allocator.page_size
    budget = create(allocator, *args, **{**kwargs, "num_mixed_decode_tokens": tokens})
    if not getattr(allocator, "swa_req_ring", False):  # whose room is counted in requests
        budget.swa_offset += tokens  # of a pool for sliding windows, where sglang leaves no room at all
    return budget


def _if_it_ever_fits(
    max_new_tokens: Callable[..., int | None], allocator: Any, input_tokens: int, *args: Any, **kwargs: Any
) -> int | None:
    if input_tokens + allocator.page_size >= kwargs["token_capacity"]:
        return None  # one 400 of sglang's
    return max_new_tokens(allocator, input_tokens, *args, **kwargs)


_ALLOCATOR = "sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator"
_WINDOWS_ALLOCATOR = "sglang.srt.mem_cache.allocator.swa.SWATokenToKVPoolAllocator"

HOOKS: dict[str, Hook] = {
    "sglang.srt.mem_cache.prefill_budget.PrefillBudget.available_chunk_tokens": (
        _within_room,
        HookType.AROUND,
    ),
    "sglang.srt.managers.schedule_policy.PrefillAdder._select_prefill_admission": (
        _where_it_fits,
        HookType.AROUND,
    ),
    f"{_ALLOCATOR}.create_prefill_budget": (_with_begun_pages, HookType.AROUND),
    f"{_WINDOWS_ALLOCATOR}.create_prefill_budget": (_with_begun_pages, HookType.AROUND),
    f"{_ALLOCATOR}.max_new_tokens_for_memory": (_if_it_ever_fits, HookType.AROUND),
}

"""The next chunk of a prompt takes no more room than there is.

Between two chunks room can be lost that was counted on when the prompt was admitted: copies to lower tiers
lock pages that could be evicted. sglang then goes on with a whole chunk and ends with "Prefill out of
memory" (0.5.21 to 0.5.23, ``PrefillBudget.available_chunk_tokens``). Here the chunk gets shorter or waits,
as sglang's own do where the model has a sliding window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_importance.upstream.hooks import Hook, HookType

if TYPE_CHECKING:
    from sglang.srt.mem_cache.prefill_budget import PrefillBudget


def _within_room(
    available_chunk_tokens: Callable[[PrefillBudget, int], int | None],
    budget: PrefillBudget,
    chunk_limit: int,
) -> int | None:
    tokens = available_chunk_tokens(budget, chunk_limit)
    if tokens is None:
        return None
    page = budget.page_size
    room = max(0, int(budget.remaining_current)) // page * page
    # None: it waits. No other prompt passes it, since each needs more than a page.
    return min(tokens, room) or None


HOOKS: dict[str, Hook] = {
    "sglang.srt.mem_cache.prefill_budget.PrefillBudget.available_chunk_tokens": (
        _within_room,
        HookType.AROUND,
    )
}

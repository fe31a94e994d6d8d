"""What the HTTP process must know of a scheduler in order to plan a pre-warm and to keep out of its way."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

SLICE_SECONDS = 0.002
CALLS_PER_LOOK = 16


def room(scheduler: Scheduler, _: dict[str, Any]) -> dict[str, Any]:
    """Tokens of the device tier: all, and those that nothing occupies."""
    allocator = scheduler.tree_cache.token_to_kv_pool_allocator
    return {"total_tokens": allocator.size, "free_tokens": allocator.available_size()}


def facts(scheduler: Scheduler, _: dict[str, Any]) -> Generator[None, None, dict[str, Any]]:
    """The ledger, the cost model and the nodes on the device, by digest; and the room."""
    cache = scheduler.tree_cache
    component = cache.importance
    ledger = component.ledger
    present = []
    end = time.perf_counter() + SLICE_SECONDS
    for count, node in enumerate(component.tree.nodes()):
        if not node.evicted:
            present.append(component.tree.end_digest(node).hex())
        if count % CALLS_PER_LOOK == 0 and time.perf_counter() > end:
            yield
            end = time.perf_counter() + SLICE_SECONDS
    return {
        **room(scheduler, {}),
        "ledger": None if ledger is None else str(ledger.path),
        "model": None if ledger is None else ledger.model.hex(),
        "keeps_token_ids": ledger is not None and ledger.keeps_token_ids,
        "page_size": component.tree.page_size,
        "cost": asdict(component.policy.cost),
        "use_importance": component.policy.use_importance,
        "has_storage": bool(cache.enable_storage),
        "present": present,
    }

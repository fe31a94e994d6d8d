"""Facts by which the HTTP process plans a pre-warm and keeps out of the scheduler's way."""

from __future__ import annotations

from dataclasses import asdict

from sgl_importance.tiers import Tier
from sglang_importance.cache.importance_cache import ImportanceRadixCache
from sglang_importance.operations.job import Document, Job, Slices
from sglang_importance.tree.occupancy import occupancy


def room(cache: ImportanceRadixCache, _: Document) -> Document:
    """Tokens of the device tier: all, and the free ones."""
    device = occupancy(cache)[Tier.DEVICE]
    return {"total_tokens": device.total, "free_tokens": device.free}


def facts(cache: ImportanceRadixCache, _: Document) -> Job:
    """The ledger, the cost model and the nodes on the device, by digest; and the room."""
    state, ledger = cache.importance.state, cache.importance.ledger
    present = []
    pause = Slices()
    for node in state.tree.nodes():
        if not node.evicted:
            present.append(state.tree.end_digest(node).hex())
        if pause.is_due():
            yield
    return {
        **room(cache, {}),
        "ledger": None if ledger is None else str(ledger.place),
        "model": None if ledger is None else ledger.model.hex(),
        "keeps_token_ids": ledger is not None and ledger.keeps_token_ids,
        "page_size": state.tree.page_size,
        "cost": asdict(state.policy.cost),
        "use_importance": state.policy.use_importance,
        "has_storage": bool(cache.enable_storage),
        "present": present,
    }

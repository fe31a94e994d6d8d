"""A page of the tree's nodes as JSON, with importance, reuse and loss."""

from __future__ import annotations

import base64
import binascii
import heapq
from typing import Any

from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sgl_importance.signal.node_importance import Origin
from sgl_importance.tiers import Tier
from sglang_importance.cache.component import ImportanceComponent
from sglang_importance.cache.importance_cache import ImportanceRadixCache, tiered_pool
from sglang_importance.metrics.scheduler_counters import Counters
from sglang_importance.operations.job import Document, Job, RequestError, Slices
from sglang_importance.operations.tiered_pages_view import describe_pages
from sglang_importance.placement.ledger_feed import describe_ledger
from sglang_importance.storage.served_chain import SERVED
from sglang_importance.storage.weights import WATCH
from sglang_importance.tree.occupancy import Occupancy, occupancy
from sglang_importance.upstream.nodes import key_of

SCHEMA_VERSION = 1
DEFAULT_LIMIT = 100
MAX_LIMIT = 1000

_SortKey = tuple[float, int]


class InvalidCursor(RequestError):
    """The cursor did not come from this endpoint."""


def encode_cursor(key: _SortKey) -> str:
    """Opaque position behind the last node of a page."""
    return base64.urlsafe_b64encode(f"{key[0].hex()}:{key[1]}".encode()).decode()


def decode_cursor(cursor: str) -> _SortKey:
    """Raises InvalidCursor where the text was not made by ``encode_cursor``."""
    try:
        loss, node_id = base64.urlsafe_b64decode(cursor.encode()).decode().split(":")
        return float.fromhex(loss), int(node_id)
    except (ValueError, OverflowError, binascii.Error) as error:
        raise InvalidCursor("cursor must be a next_cursor of an earlier answer") from error


def snapshot(
    cache: ImportanceRadixCache, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None, min_tokens: int = 0
) -> Job:
    """Nodes by loss, largest first, and the tiers that hold them.

    A generator, so that its caller decides how long the scheduler is held: each ``next`` runs for about
    SLICE_SECONDS, and requests may change the tree in between. Nodes that leave
    before they are described are left out.
    Losses move with the clock, so pages read at different clocks may repeat or miss a node; the answer
    carries its clock.

    Args:
        cache: the cache to describe.
        limit: nodes in this page, at most MAX_LIMIT.
        cursor: ``next_cursor`` of the page before; None for the first.
        min_tokens: leaves out nodes with fewer tokens.

    Returns:
        The document of ``GET /kv_importance``.

    Raises:
        InvalidCursor: the cursor is not one of ours.
    """
    component = cache.importance
    after = decode_cursor(cursor) if cursor else None
    if not component.state.faults.is_learning:
        return {
            "version": SCHEMA_VERSION,
            **describe_cache(cache, stored_tokens=0),
            "nodes": [],
            "next_cursor": None,
        }
    pause = Slices()

    nodes: list[UnifiedTreeNode] = []
    stored_tokens = 0
    for node in component.state.tree.nodes():
        nodes.append(node)
        stored_tokens += len(key_of(node)) if component.state.tree.metadata(node).in_storage else 0
        if pause.is_due():
            yield

    reuse: dict[int, float] = {}
    for node in reversed(nodes):  # children before parents: a child's reuse is its parent's
        own = component.state.policy.reuse_probability(component.state.tree.metadata(node))
        reuse[node.id] = max(own, reuse.get(node.id, 0.0))
        if node.parent is not None:
            reuse[node.parent.id] = max(reuse[node.id], reuse.get(node.parent.id, 0.0))
        if pause.is_due():
            yield

    largest: list[tuple[_SortKey, UnifiedTreeNode]] = []  # a heap: to sort all would be one long slice
    is_last = True
    for node in nodes:
        key = (component.leaves.loss(node), node.id)
        if len(key_of(node)) >= min_tokens and (after is None or key < after):
            heapq.heappush(largest, (key, node))
            if len(largest) > limit:
                heapq.heappop(largest)
                is_last = False
        if pause.is_due():
            yield

    page = sorted(largest, reverse=True)
    rows = []
    for key, node in page:
        if node in component.state.tree:
            rows.append(describe_node(component, node, loss=key[0], p_reuse=reuse[key[1]]))
        if pause.is_due():
            yield
    return {
        "version": SCHEMA_VERSION,
        **describe_cache(cache, stored_tokens),
        "nodes": rows,
        "next_cursor": None if is_last else encode_cursor(page[-1][0]),
    }


def describe_chain() -> Document | None:
    """The storage tiers of this server and what ranks their pages; None where it has no chain."""
    chain = SERVED.chain
    return None if chain is None else {"ranking": SERVED.ranking, "tiers": chain.snapshot()}


def describe_tree(cache: ImportanceRadixCache, arguments: Document) -> Job:
    """The operation behind ``GET /kv_importance``; its arguments are those of ``snapshot``."""
    document = yield from snapshot(cache, **arguments)
    document["hits"] = describe_hits(cache.importance.state.counters)
    if (observation := cache.importance.observation()) is not None:
        document["observe"] = observation
    if (ledger := describe_ledger(cache.importance.ledger, cache.importance.state)) is not None:
        document["ledger"] = ledger
    if (pool := tiered_pool(cache)) is not None:
        document["pages"] = describe_pages(pool)
    if (chain := describe_chain()) is not None:
        document["store_tiers"] = chain
    if counts := WATCH.counters.values():
        document["store"] = {".".join(filter(None, key)): count for key, count in counts.items()}
    return document


def describe_node(
    component: ImportanceComponent, node: UnifiedTreeNode, *, loss: float, p_reuse: float
) -> dict[str, Any]:
    metadata = component.state.tree.metadata(node)
    importance = metadata.importance
    held = {Tier.DEVICE: not node.evicted, Tier.HOST: node.backuped, Tier.STORAGE: metadata.in_storage}
    assert node.parent is not None
    return {
        "id": node.id,
        "parent": node.parent.id if node.parent.parent is not None else None,
        "depth_tokens": metadata.depth,
        "tokens": metadata.tokens,
        "tiers": [tier.value for tier, holds in held.items() if holds],
        "body_mass": float(importance.body_mass().sum()),
        "peak": float(importance.peak().max()),
        "lift": importance.lift(),
        "self_mass": float(importance.body_mass(Origin.SELF).sum()),
        "cross_mass": float(importance.body_mass(Origin.CROSS).sum()),
        "queries": importance.queries,
        "accesses": metadata.accesses,
        "answer_end": metadata.answer_end.name.lower(),
        "age": component.state.policy.clock - metadata.last_access,
        "p_reuse": p_reuse,
        "loss": loss,
        "pinned": any(metadata.pin_octaves.values()),
    }


def describe_cache(cache: ImportanceRadixCache, stored_tokens: int) -> dict[str, Any]:
    """Facts of the whole tree: policy, page size, clock, tiers, faults, ages, volatile beginnings."""
    component = cache.importance
    return {
        "policy": component.state.options.policy,
        "page_size": component.state.tree.page_size,
        "clock": component.state.policy.clock,
        "tiers": describe_tiers(cache, stored_tokens),
        "faults": component.state.faults.describe(),
        "ages": component.state.counters.ages.describe(),
        "volatile": describe_beginnings(component),
    }


def describe_beginnings(component: ImportanceComponent) -> list[Document]:
    """Places where text changes with each request, the dearest first; their texts as token ids."""
    beginnings = component.requests.beginnings
    return [] if beginnings is None else beginnings.places()


def describe_hits(counters: Counters) -> dict[str, Any]:
    """Admitted requests since the start, their prompt tokens, and of these what each tier had."""
    return {
        "requests": counters.requests,
        "prompt_tokens": counters.prompt_tokens,
        "hit_tokens": {tier.value: tokens for tier, tokens in counters.hit_tokens.items()},
    }


def describe_tiers(cache: ImportanceRadixCache, stored_tokens: int) -> dict[str, Any]:
    """Occupancy in tokens. The size of the storage tier is not known to the server: total is null."""
    tiers = occupancy(cache)
    sized = {
        tier.value: {"used_tokens": each.used, "total_tokens": each.total}
        for tier in (Tier.DEVICE, Tier.HOST)
        for each in [tiers.get(tier, Occupancy(0, 0))]
    }
    total = None if cache.enable_storage else 0
    return {**sized, Tier.STORAGE.value: {"used_tokens": stored_tokens, "total_tokens": total}}

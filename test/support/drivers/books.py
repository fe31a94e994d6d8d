"""Our accounts beside upstream's: every number that two sides keep, compared."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sgl_importance.observe.trace import open_trace
from sgl_importance.observe.trace.records import EventKind, TreeEvent
from sgl_importance.tiers import Tier

from support.drivers.hosted_driver import HostedDriver, Request


def check_books(driver: HostedDriver, live: list[Request]) -> None:
    """Asserts that both sides agree, at any moment between two operations.

    Args:
        live: requests that hold a row.
    """
    cache, component = driver.cache, driver.component
    allocator = cache.token_to_kv_pool_allocator
    nodes = list(component.state.tree.nodes())

    private = sum(request.slots_allocated - request.kv.cache_protected_len for request in live)
    in_tree = cache.evictable_size() + cache.protected_size()
    assert allocator.available_size() + in_tree + private == allocator.size, "free + used = device pool"

    known = [component.state.tree.metadata(node) for node in nodes]
    on_device = sum(data.tokens for data, node in zip(known, nodes, strict=True) if not node.evicted)
    assert on_device == in_tree, "our tokens of device nodes = upstream's evictable + protected"
    on_host = sum(data.tokens for data, node in zip(known, nodes, strict=True) if node.backuped)
    assert driver.host_pool.available_size() + on_host == driver.host_pool.size, "host pool"
    locked = sum(
        data.tokens
        for data, node in zip(known, nodes, strict=True)
        if not node.evicted and node.component_data[ComponentType.FULL].lock_ref > 0
    )
    assert locked == cache.protected_size(), "protected size = tokens of locked device nodes"

    for data, node in zip(known, nodes, strict=True):
        assert data.off_device == node.evicted, (node.id, "whether the device holds it")

    counters = component.state.counters
    assert counters.requests == component.state.policy.clock
    assert counters.evicted_from(Tier.DEVICE) == driver.evicted, "evicted device tokens"
    assert counters.hit_tokens[Tier.DEVICE] == driver.hits["device"]
    assert counters.hit_tokens[Tier.HOST] == driver.hits["host"]

    ghosts = component.state.tree.ghosts
    assert len(ghosts) <= ghosts.capacity_pages
    component.check_integrity()
    _check_sizes(driver)


def _check_sizes(driver: HostedDriver) -> None:
    """Our own structures stay in proportion to what they describe."""
    for tier, order in driver.component.state.policy._orders.items():
        live = len(order)
        held = sum(len(cell.heap) for cell in order._cells.values())
        stale = held - live
        assert stale <= live + 64 * (len(order._cells) + 1), (tier, held, live)
        assert len(order._agenda) <= 2 * live + 64 + len(order._cells) + 1, (tier, len(order._agenda), live)
    assert not getattr(driver.component.order, "_taken", ())
    assert not driver.component.leaves.take_unknown_host_leaves()


OUR_OBJECTS = (
    "NodeMetadata",
    "NodeImportance",
    "GhostNode",
    "QueryFolds",
    "Pin",
    "Request",
    "UnifiedTreeNode",
)


def object_counts() -> Counter[str]:
    """Live Python objects of the kinds that could leak, and of all kinds; none that are frozen (``gc``)."""
    gc.collect()
    names = Counter(type(item).__name__ for item in gc.get_objects())
    counts = Counter({name: names[name] for name in OUR_OBJECTS})
    counts["all"] = sum(names.values())
    return counts


def check_recording(directory: Path, driver: HostedDriver) -> dict[str, int]:
    """Asserts that the recorded events add up to the tree as it is; the recorder must be closed.

    Returns:
        Number of events by kind.
    """
    page_size = driver.page_size
    pages: Counter[str] = Counter()
    alive: set[int] = set()
    events: Counter[str] = Counter()
    trace = open_trace(directory)
    for record in trace:
        if not isinstance(record, TreeEvent):
            continue
        events[f"{record.kind} {record.tier}"] += 1
        match record.kind:
            case EventKind.RESET:
                pages.clear()
                alive.clear()
            case EventKind.INSERT:
                alive.add(record.node)
                pages[Tier.DEVICE] += record.num_pages
            case EventKind.SPLIT:
                alive.add(record.node)
            case EventKind.REMOVE:
                alive.remove(record.node)
            case EventKind.EVICT:
                pages[record.tier] -= record.num_pages
            case EventKind.LOAD_BACK | EventKind.BACK_UP:
                pages[record.tier] += record.num_pages
    assert trace.dropped == 0, "the recording has gaps: nothing can be added up"
    nodes = list(driver.component.state.tree.nodes())
    assert alive == {node.id for node in nodes}, "recorded nodes are the tree's"
    on_device = sum(len(node.key) for node in nodes if not node.evicted) // page_size
    on_host = sum(len(node.key) for node in nodes if node.backuped) // page_size
    assert pages[Tier.DEVICE] == on_device, (pages, on_device)
    assert pages[Tier.HOST] == on_host, (pages, on_host)
    return dict(events)

"""The last moves of the tree, as JSON."""

from __future__ import annotations

import time
from typing import Any

from sglang_importance.cache.importance_cache import ImportanceRadixCache
from sglang_importance.operations.job import Document
from sglang_importance.tree.event_log import Event


def describe_event(event: Event) -> dict[str, Any]:
    """As JSON."""
    return event._asdict()


def let_time_pass(cache: ImportanceRadixCache, _: Document) -> Document:
    """What ``events`` changes: a pin whose lifetime is over ends even where no request comes."""
    component = cache.importance
    if component.state.faults.is_learning:
        component.pins.let_time_pass()
    return {}


def events(cache: ImportanceRadixCache, arguments: Document) -> Document:
    """``since`` and ``limit``: the events from a serial number on."""
    let_time_pass(cache, arguments)
    component = cache.importance
    log = component.state.events
    found = log.since(arguments["since"], arguments["limit"])
    first = found[0][0] if found else log.total
    return {
        "events": [{"serial": serial, **describe_event(event)} for serial, event in found],
        "next": log.total,
        "left_out": max(first - arguments["since"], 0),
        "clock": component.state.policy.clock,
        "now": time.time(),
    }

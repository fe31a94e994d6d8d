"""The log of the last moves of nodes and of pins, with the reason of each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from itertools import islice
from typing import Any, NamedTuple

from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sgl_importance.observe.trace.records import EventKind
from sgl_importance.placement.pins.pin import Pin, PinEnd
from sgl_importance.tiers import Tier
from sglang_importance.upstream.nodes import key_of

CAPACITY = 4096
"""Events that are remembered, in about 1 MB."""


class PinChange(StrEnum):
    """The beginning or the end of a pin; nothing moves."""

    PIN = "pin"
    UNPIN = "unpin"


class Event(NamedTuple):
    """One move of one node, or the beginning or end of a pin.

    Attributes:
        kind: of move.
        tier: of the copy that moved; of a split, a reset or a pin always the device.
        node: id of the node; None of a pin, which holds text and not nodes.
        tokens: of the node, when it happened, or of the pin.
        clock: in admitted requests.
        time: Unix time in seconds.
        reason: of the move; empty where the kind implies it.
        pin_id: of the pin; None of a node.
    """

    kind: EventKind | PinChange
    tier: Tier
    node: int | None
    tokens: int
    clock: int
    time: float
    reason: str
    pin_id: str | None = None


class EventLog:
    """The last events of one tree, each under a serial number that is never given twice.

    Hits are left out: they are many, they move nothing, and nodes count them.

    Args:
        clock: admitted requests so far.
        capacity: events to remember; the oldest make room.
    """

    def __init__(self, clock: Callable[[], int], capacity: int = CAPACITY) -> None:
        self._clock = clock
        self._events: deque[tuple[Any, ...]] = deque(maxlen=capacity)
        self.total = 0
        """Events so far; the serial number of the next one."""

    def record(self, kind: EventKind, tier: Tier, node: UnifiedTreeNode, reason: str) -> None:
        """Appends an event of a node. In constant time: it is called within evictions."""
        self._append(kind, tier, node.id, len(key_of(node)), reason)

    def prefetched(self, node: UnifiedTreeNode) -> None:
        """The storage tier brought a node into host memory that the tree did not know."""
        self._append(EventKind.LOAD_BACK, Tier.HOST, node.id, len(key_of(node)), "prefetched")

    def reset(self) -> None:
        """The tree was emptied at once."""
        self._append(EventKind.RESET, Tier.DEVICE, 0, 0, "flushed")

    def pinned(self, pin: Pin, reason: str) -> None:
        """A pin was taken in."""
        self._append(PinChange.PIN, Tier.DEVICE, None, len(pin.tokens), reason, pin.pin_id)

    def unpinned(self, pin: Pin, why: PinEnd) -> None:
        """A pin has ended."""
        self._append(PinChange.UNPIN, Tier.DEVICE, None, len(pin.tokens), why, pin.pin_id)

    def since(self, serial: int, limit: int) -> list[tuple[int, Event]]:
        """The newest events from a serial number on, oldest first, each with its number.

        Args:
            serial: of the first event that is wanted; older ones than the log keeps are left out.
            limit: events at most; of more, the newest.
        """
        wanted = min(max(self.total - serial, 0), limit, len(self._events))
        # From the right end: a deque is slow in its middle.
        newest = list(islice(reversed(self._events), wanted))
        return list(enumerate(map(Event._make, reversed(newest)), self.total - wanted))

    def last_of(self, node_id: int) -> Event | None:
        """The last event of a node; None where that is forgotten."""
        return next((Event._make(each) for each in reversed(self._events) if each[2] == node_id), None)

    def _append(
        self,
        kind: EventKind | PinChange,
        tier: Tier,
        node: int | None,
        tokens: int,
        reason: str,
        pin_id: str | None = None,
    ) -> None:
        self.total += 1
        self._events.append((kind, tier, node, tokens, self._clock(), time.time(), reason, pin_id))

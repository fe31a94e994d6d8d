"""What a router that follows a server's KV events knows of its cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    StorageMedium,
)

from sgl_importance.tiers import Tier

Prefix = tuple[int, ...]
"""A page, by all token ids up to its end."""

_TIERS = {StorageMedium.GPU: Tier.DEVICE, StorageMedium.CPU: Tier.HOST}


class EventMirror:
    """Pages by tier, from events alone. What does not follow from the events before is an AssertionError.

    Attributes:
        held: pages of each tier.
        counts: events by name.
    """

    def __init__(self) -> None:
        self.held: dict[Tier, set[Prefix]] = {tier: set() for tier in _TIERS.values()}
        self.counts: dict[str, int] = {}
        self._prefixes: dict[int, Prefix] = {}

    def take(self, events: Iterable[Any]) -> None:
        for event in events:
            name = type(event).__name__
            self.counts[name] = self.counts.get(name, 0) + 1
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    tier = self.held[_TIERS[StorageMedium(event.medium)]]
                    for block in event.block_hashes:
                        tier.remove(self._prefixes[block])
                case AllBlocksCleared():
                    for tier in self.held.values():
                        tier.clear()

    def _store(self, event: BlockStored) -> None:
        held = self.held[_TIERS[StorageMedium(event.medium)]]
        parent = event.parent_block_hash
        assert parent is None or parent in self._prefixes, "a page below one that was never stored"
        prefix = () if parent is None else self._prefixes[parent]
        pages = [
            event.token_ids[start : start + event.block_size]
            for start in range(0, len(event.token_ids), event.block_size)
        ]
        for block, page in zip(event.block_hashes, pages, strict=True):
            prefix = (*prefix, *page)
            assert self._prefixes.setdefault(block, prefix) == prefix, "one hash for two pages"
            held.add(prefix)

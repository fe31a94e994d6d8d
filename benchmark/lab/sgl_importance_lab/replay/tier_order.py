"""The server's eviction order of one tier, as a replay policy."""

from __future__ import annotations

from typing import ClassVar

from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.tiers import Tier
from sgl_importance_lab.policies.base import EvictionPolicy
from sgl_importance_lab.replay.trace_nodes import TraceNodes


class TierOrder(EvictionPolicy):
    """The order of one tier in an ``ImportancePolicy`` that all tiers share.

    Args:
        capacity: blocks that the tier can hold.
        tier: which tier.
        nodes: facts about the blocks; the driver of the tiers reports each visit to them.
    """

    name: ClassVar[str] = "importance"

    def __init__(self, capacity: int, tier: Tier, nodes: TraceNodes) -> None:
        super().__init__(capacity)
        self.nodes = nodes
        self._tier = tier

    def node(self, block: int) -> NodeMetadata:
        """The metadata of a block in the cache."""
        return self.nodes[block]

    def insert(self, block: int) -> None:
        """The visit was told to ``nodes``."""

    def access(self, block: int) -> None:
        """The visit was told to ``nodes``."""

    def evictable(self, block: int) -> None:
        self.nodes.policy.enter(self._tier, block, self.node(block), below=None)

    def held(self, block: int) -> None:
        self.nodes.policy.leave(self._tier, block)

    def victim(self) -> int:
        block = self.nodes.policy.victim(self._tier)
        assert block is not None
        return block

"""Which evictable nodes each turn was the last to visit: they are ranked anew when the turn changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.policy.victim_order import VictimOrder
from sgl_importance.reuse.turns import Turn
from sgl_importance.tiers import Tier

_Key = tuple[Tier, int]


class RankedNode(NamedTuple):
    """What ``ImportancePolicy.enter`` was called with."""

    tier: Tier
    node_id: int
    node: NodeMetadata
    below: Tier | None


class RankedTurns:
    """The evictable nodes of every turn that has some; of most turns that is one, the end of its text."""

    def __init__(self) -> None:
        self._turns: dict[_Key, Turn] = {}
        self._nodes: dict[Turn, dict[_Key, RankedNode]] = {}

    def enter(self, tier: Tier, node_id: int, node: NodeMetadata, below: Tier | None) -> None:
        """The node is evictable, or has another turn than before."""
        key = tier, node_id
        turn = node.ranking_turn
        if self._turns.get(key) is not turn:
            self.leave(tier, node_id)
        if turn is not None:
            self._turns[key] = turn
            self._nodes.setdefault(turn, {})[key] = RankedNode(tier, node_id, node, below)

    def leave(self, tier: Tier, node_id: int) -> None:
        """The node is not evictable any more."""
        key = tier, node_id
        turn = self._turns.pop(key, None)
        if turn is not None:
            nodes = self._nodes[turn]
            del nodes[key]
            if not nodes:
                del self._nodes[turn]

    def entries(self, turn: Turn) -> list[RankedNode]:
        """The evictable nodes of a turn."""
        return list(self._nodes.get(turn, {}).values())

    def check_integrity(self, orders: Mapping[Tier, VictimOrder]) -> None:
        """Asserts that every node that it knows is in the order of its tier, with the turn that it has."""
        for (tier, node_id), turn in self._turns.items():
            assert node_id in orders[tier]
            assert self._nodes[turn][tier, node_id].node.turn is turn
        assert sum(map(len, self._nodes.values())) == len(self._turns)

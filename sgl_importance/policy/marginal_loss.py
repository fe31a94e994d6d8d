"""Marginal loss: seconds per byte and request that the server loses by evicting a node.

loss(node) = reuse rate x [restore(from where it would be) - restore(from where it is)] x g / bytes freed

The reuse rate is a retention index: reuses per admitted request that keeping the node can earn. P(reuse)
alone would hold a node that is certain to return in an hour against one that returns in a minute. Where it is
known how answers end, and where most requests go on from an earlier one, a node's rate is that of the turn
that visited it last (``reuse.turns``), unless sessions parted at its end or a pin holds it; else it is that
of the node's own class (``reuse.estimator``).

Only leaves can be evicted and a prefix is useful only whole, so attention predicts reuse indirectly; g is
bounded, monotone, and 1 without evidence, which makes "g = 1" the control arm of every claim about it.

With linear attention a request goes on from a state, of which some nodes' ends have one: KV that leads to
none is worth nothing, and states that requests go by go before others.

A soft pin (``sgl_importance.placement.pins``) multiplies the loss of its nodes, so that they go last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.policy.victim_order import VictimOrder
from sgl_importance.reuse.estimator import ReuseEstimator
from sgl_importance.reuse.reuse_index import NodesAndTurns, class_of_turn
from sgl_importance.reuse.turns import Turn, TurnEstimator
from sgl_importance.signal.node_importance import NodeImportance, Origin
from sgl_importance.tiers import Tier

MIN_DISTINCT_QUERIES = 2  # one later query may be the same user again
SHRINKAGE_QUERIES = 4.0  # weight, in queries, of the belief that a node is as important as any other
MAX_FACTOR = 2.0
# A loss of exactly 0 would make nodes incomparable: as if restoring cost a nanosecond per token.
MIN_SECONDS_PER_TOKEN = 1e-9
PASSED_FACTOR = 1e-30  # on the loss of a state that requests go by
EXPENDABLE_VALUE = 1e-60  # below what any other node can lose, whatever its reuse rate


def importance_factor(importance: NodeImportance) -> float:
    """g: between 1/2 and 2, never decreasing in cross mass and peak, 1 without evidence.

    Only cross mass of at least two distinct queries counts: self mass of a one-off prompt is recency in
    disguise. Relative mass shrinks towards 1.0 by (n * observed + k) / (n + k), n the decayed query count.
    """
    if importance.queries < MIN_DISTINCT_QUERIES:
        return 1.0
    queries = float(importance.weight(Origin.CROSS).max())
    # A retrieval head that is certain of one page is invisible in the mean and plain in the peak.
    observed = max(importance.lift(Origin.CROSS), MAX_FACTOR * float(importance.peak(Origin.CROSS).max()))
    shrunk = (queries * observed + SHRINKAGE_QUERIES) / (queries + SHRINKAGE_QUERIES)
    return min(max(shrunk, 1 / MAX_FACTOR), MAX_FACTOR)


class ImportancePolicy:
    """Ranks the evictable nodes of every tier by marginal loss. Decides; never moves anything.

    A ``ReuseTracker`` follows the nodes' lives and keeps the facts that are ranked here.

    The clock counts admitted requests: the same requests lead to the same evictions on every rank.

    Args:
        cost: the cost model of restoring.
        use_importance: False fixes g at 1, the control arm.
    """

    def __init__(self, cost: CostModel, *, use_importance: bool = True) -> None:
        self.cost = cost
        self._seconds_per_token = {tier: cost.seconds_per_token(tier) for tier in (*Tier, None)}
        self.use_importance = use_importance
        self.reuse = ReuseEstimator()
        self.turns = TurnEstimator()
        self.index = NodesAndTurns(self.reuse, self.turns)
        self._orders: dict[Tier, VictimOrder] = {}
        self._ranked = RankedTurns()
        self.reset()

    def reset(self) -> None:
        """Forgets the nodes, keeps the estimate of reuse."""
        self.reuse.forget_open()
        self.turns.forget_open()
        self._orders = {tier: VictimOrder(self.index) for tier in Tier}
        self._ranked = RankedTurns()

    @property
    def clock(self) -> int:
        """Requests admitted so far."""
        return self.reuse.clock

    def admit(self) -> int:
        """One more request was admitted; returns its serial number."""
        return self.reuse.tick()

    # ---- the eviction order ----

    def enter(self, tier: Tier, node_id: int, node: NodeMetadata, *, below: Tier | None) -> None:
        """The node became evictable on a tier, or its facts changed while it was.

        Args:
            tier: tier that it would be evicted from.
            node_id: key of the node in the order.
            node: its facts.
            below: tier that keeps a copy; None where eviction means losing the KV.
        """
        value = self.value(tier, node, below=below)
        reuse_class, since = self._rank(tier, node)
        self._orders[tier].add(node_id, reuse_class, value, since)
        self._ranked.enter(tier, node_id, node, below)

    def leave(self, tier: Tier, node_id: int) -> None:
        """The node is not evictable from the tier any more: locked, moved, extended or gone."""
        self._orders[tier].discard(node_id)
        self._ranked.leave(tier, node_id)

    def turn_changed(self, turn: Turn) -> None:
        """The turn went on, or is predicted anew: what it was the last to visit is ranked again."""
        for tier, node_id, node, below in self._ranked.entries(turn):
            self.enter(tier, node_id, node, below=below)

    def victim(self, tier: Tier) -> int | None:
        """Takes the node that loses least out of the order; None where nothing is evictable."""
        node_id = self._orders[tier].pop()
        if node_id is not None:
            self._ranked.leave(tier, node_id)
        return node_id

    def evictable(self, tier: Tier) -> int:
        """Number of nodes in the tier's order."""
        return len(self._orders[tier])

    def factor(self, node: NodeMetadata) -> float:
        """g of the node; 1 in the control arm."""
        return importance_factor(node.importance) if self.use_importance else 1.0

    @staticmethod
    def bias(tier: Tier, node: NodeMetadata) -> float:
        """Factor of soft pins on the node's loss; 1 where it is not pinned on the tier."""
        bias: float = 2.0 ** node.pin_octaves.get(tier, 0.0)
        return bias

    def value(self, tier: Tier, node: NodeMetadata, *, below: Tier | None) -> float:
        """Loss if reuse were certain: seconds to restore per KV byte freed, times g and pin.

        Tokens deep in a prompt count like its first ones, although attending makes them dearer: a leaf is
        only the first of its chain to go, so its own price says little about the loss of the chain.
        """
        is_demoted = node.is_demoted and tier is Tier.DEVICE and below is not None
        if (node.expendable or node.lacks_state or is_demoted) and tier not in node.pin_octaves:
            return EXPENDABLE_VALUE
        seconds = max(self._seconds_per_token[below] - self._seconds_per_token[tier], MIN_SECONDS_PER_TOKEN)
        return seconds * self.factor(node) * self.bias(tier, node) / self.cost.bytes_per_token

    def reuse_probability(self, node: NodeMetadata) -> float:
        """P(the node is asked for in the next 32,768 admitted requests); where a turn ranks it, P(the turn
        goes on at all)."""
        reuse_class, since = self._rank(None, node)
        return self.index.probability(reuse_class, self.clock - since)

    def reuse_rate(self, tier: Tier | None, node: NodeMetadata) -> float:
        """Reuses per admitted request that keeping the node on the tier can earn."""
        reuse_class, since = self._rank(tier, node)
        return self.index.index(reuse_class, self.clock - since)

    def loss(self, tier: Tier, node: NodeMetadata, *, below: Tier | None) -> float:
        """Seconds lost per KV byte freed and admitted request by evicting the node from the tier."""
        return self.reuse_rate(tier, node) * self.value(tier, node, below=below)

    def state_loss(self, node: NodeMetadata, *, below: Tier | None, is_passed: bool) -> float:
        """Loss by giving up the state of linear attention at the node's end, on the device.

        As of KV, seconds lost per byte of KV: with a leaf's state all of the leaf goes. How many tokens a
        state spares does not count: that was tried, and found no more.

        Args:
            below: tier that keeps a copy of the state; None where it is lost.
            is_passed: whether requests that ask for the node go on from a state behind it.
        """
        loss = self.loss(Tier.DEVICE, node, below=below)
        return loss * PASSED_FACTOR if is_passed else loss

    @staticmethod
    def _rank(tier: Tier | None, node: NodeMetadata) -> tuple[int, int]:
        """The class that predicts the node on a tier, and the clock from which its age counts."""
        turn = node.ranking_turn
        if turn is None or node.is_parted or tier in node.pin_octaves:
            return node.reuse_class, node.last_access
        return class_of_turn(turn), int(turn.since)

    def check_integrity(self) -> None:
        for tier in Tier:
            self._orders[tier].check_integrity()
        self._ranked.check_integrity(self._orders)


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

"""Marginal loss: what the server loses by giving a node up.

loss(node) = P(reuse) x [restore(from where it would be) - restore(from where it is)] x g / bytes freed

Only leaves can be evicted and a prefix is useful only whole, so attention predicts reuse indirectly; g is
bounded, monotone, and 1 without evidence, which makes "g = 1" the control arm of every claim about it.
"""

from __future__ import annotations

from sgl_importance.cost import CostModel, Tier
from sgl_importance.importance import NodeImportance, Origin
from sgl_importance.node import NodeMetadata
from sgl_importance.policy.victims import VictimOrder
from sgl_importance.reuse import ReuseEstimator

MIN_DISTINCT_QUERIES = 2  # one later query may be the same user repeating himself
SHRINKAGE_QUERIES = 4.0  # weight, in queries, of the belief that a node is as important as any other
MAX_FACTOR = 2.0
# A loss of exactly 0 would make nodes incomparable: as if restoring cost a nanosecond per token.
MIN_SECONDS_PER_TOKEN = 1e-9


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

    The clock counts admitted requests: the same requests lead to the same evictions on every rank.

    Args:
        cost: what restoring costs.
        use_importance: False fixes g at 1, the control arm.
    """

    def __init__(self, cost: CostModel, *, use_importance: bool = True) -> None:
        self.cost = cost
        self.use_importance = use_importance
        self.reuse = ReuseEstimator()
        self.clock = 0
        self._orders: dict[Tier, VictimOrder] = {}
        self.reset()

    def reset(self) -> None:
        """Forgets the nodes, keeps what was learnt about reuse."""
        self._orders = {tier: VictimOrder(self.reuse.probability) for tier in (Tier.DEVICE, Tier.HOST)}

    def admit(self) -> int:
        """One more request was admitted; returns its serial number."""
        self.clock += 1
        return self.clock

    def accessed(self, node: NodeMetadata) -> None:
        """An admitted request found the node in the cache."""
        self.reuse.hit(node.reuse_class, self.clock - node.last_access)
        node.accesses += 1
        node.last_access = self.clock

    def enter(self, tier: Tier, node_id: int, node: NodeMetadata, *, below: Tier | None) -> None:
        """The node became evictable on a tier, or its facts changed while it was.

        Args:
            tier: tier that it would be evicted from.
            node_id: key of the node in the order.
            node: its facts.
            below: tier that keeps a copy; None where eviction means losing the KV.
        """
        self._orders[tier].add(
            node_id, node.reuse_class, self.value(tier, node, below=below), node.last_access
        )

    def leave(self, tier: Tier, node_id: int) -> None:
        """The node is not evictable from the tier any more: locked, moved, extended or gone."""
        self._orders[tier].discard(node_id)

    def victim(self, tier: Tier) -> int | None:
        """Takes the node that loses least out of the order; None where nothing is evictable."""
        return self._orders[tier].pop(self.clock)

    def evictable(self, tier: Tier) -> int:
        """Number of nodes in the tier's order."""
        return len(self._orders[tier])

    def factor(self, node: NodeMetadata) -> float:
        """g of the node; 1 in the control arm."""
        return importance_factor(node.importance) if self.use_importance else 1.0

    def value(self, tier: Tier, node: NodeMetadata, *, below: Tier | None) -> float:
        """What a certain reuse would lose: seconds to restore per KV byte freed, times g."""
        seconds = self.cost.restore_seconds(node.tokens, node.depth, below) - self.cost.restore_seconds(
            node.tokens, node.depth, tier
        )
        seconds = max(seconds, MIN_SECONDS_PER_TOKEN * node.tokens)
        return seconds * self.factor(node) / (node.tokens * self.cost.bytes_per_token)

    def reuse_probability(self, node: NodeMetadata) -> float:
        return self.reuse.probability(node.reuse_class, self.clock - node.last_access)

    def loss(self, tier: Tier, node: NodeMetadata, *, below: Tier | None) -> float:
        """Expected seconds lost per KV byte freed by evicting the node from the tier."""
        return self.reuse_probability(node) * self.value(tier, node, below=below)

    def check_integrity(self) -> None:
        for order in self._orders.values():
            order.check_integrity()

"""The control of every claim about importance: the same factors, given to the wrong nodes."""

from __future__ import annotations

from collections import deque

from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.policy.marginal_loss import ImportancePolicy

REMEMBERED_FACTORS = 1024
_MULTIPLIER = 0x9E3779B97F4A7C15  # Fibonacci hashing (Knuth, TAOCP 6.4)
_BITS = 64


class ShuffledImportancePolicy(ImportancePolicy):
    """Ranks with factors that other nodes earned: their distribution is right, their places are not.

    A node is given the same quantile of the recent factors whenever it is asked about, so that a wrong
    factor is as steady as a right one.
    """

    def __init__(self, cost: CostModel) -> None:
        super().__init__(cost, use_importance=True)
        self._recent: deque[float] = deque(maxlen=REMEMBERED_FACTORS)

    def factor(self, node: NodeMetadata) -> float:
        self._recent.append(super().factor(node))
        creator = node.importance.creator or 0
        place = ((creator << 20 ^ node.depth) * _MULTIPLIER) % (1 << _BITS)
        return sorted(self._recent)[place * len(self._recent) >> _BITS]

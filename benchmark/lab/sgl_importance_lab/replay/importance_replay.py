"""The server's own policy as a replay policy, in the readable form that the fast path is tested against."""

from __future__ import annotations

from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.tiers import Tier
from sgl_importance_lab.replay.sessions import BlockFacts
from sgl_importance_lab.replay.tier_order import TierOrder
from sgl_importance_lab.replay.trace import Trace
from sgl_importance_lab.replay.trace_nodes import TraceNodes

# A hit rate counts every block alike, so a replay for hit rates lets every block cost the same.
UNIFORM_COST = CostModel(
    prefill_seconds_per_token=1.0,
    prefill_seconds_per_token_pair=1e-15,
    bytes_per_token=1,
    host_bytes_per_second=1.0,
    storage_bytes_per_second=1.0,
)


class ImportanceReplayPolicy(TierOrder):
    """The policy over one tier, driven by a replay cache of blocks.

    Args:
        capacity: blocks that the cache can hold.
        trace: the trace that is replayed; only its past is used at any moment.
        facts: ``block_facts(trace)``, where the caller has them.
        cost: the cost model of restoring.
    """

    def __init__(
        self,
        capacity: int,
        trace: Trace,
        *,
        facts: BlockFacts | None = None,
        cost: CostModel = UNIFORM_COST,
    ) -> None:
        nodes = TraceNodes(trace, cost, facts=facts)
        super().__init__(capacity, Tier.DEVICE, nodes)
        self._trace = trace
        self._candidates: set[int] = set()
        self._start = 0
        self._position = 0

    def node(self, block: int) -> NodeMetadata:
        return self.nodes[block]

    def begin_request(self, request: int) -> None:
        self.nodes.begin_request()
        self._start = int(self._trace.offsets[request])
        self._position = 0

    def at(self, position: int) -> None:
        self._position = position

    def insert(self, block: int) -> None:
        self._visit(block)

    def access(self, block: int) -> None:
        self._visit(block)
        if block in self._candidates:
            self.evictable(block)

    def _visit(self, block: int) -> None:
        self.nodes.visit(block, self._start + self._position, self._position)
        self._position += 1

    def evictable(self, block: int) -> None:
        self._candidates.add(block)
        super().evictable(block)

    def held(self, block: int) -> None:
        self._candidates.discard(block)
        super().held(block)

    def victim(self) -> int:
        block = super().victim()
        self._candidates.discard(block)
        return block

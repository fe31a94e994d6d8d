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
    """The policy over one tier, driven by a replay cache of blocks or nodes.

    Args:
        capacity: blocks that the cache can hold.
        trace: the trace that is replayed; only its past is used at any moment.
        facts: ``block_facts(trace)``, where the caller has them.
        cost: the cost model of restoring.
        whole_nodes: whether the cache evicts whole nodes, each of which then counts as evidence once.
    """

    def __init__(
        self,
        capacity: int,
        trace: Trace,
        *,
        facts: BlockFacts | None = None,
        cost: CostModel = UNIFORM_COST,
        whole_nodes: bool = False,
    ) -> None:
        nodes = TraceNodes(trace, cost, facts=facts, whole_nodes=whole_nodes)
        super().__init__(capacity, Tier.DEVICE, nodes)
        self._trace = trace
        # The cache names a node by its last block; as on the server, a return is recognised by the first.
        self._first_blocks: dict[int, int] = {}
        self._candidates: set[int] = set()
        self._start = 0
        self._position = 0

    def node(self, block: int) -> NodeMetadata:
        return self.nodes[self._first_blocks[block]]

    def begin_request(self, request: int) -> None:
        self.nodes.begin_request()
        self._start = int(self._trace.offsets[request])
        self._position = 0

    def at(self, position: int) -> None:
        self._position = position

    def insert(self, block: int) -> None:
        self._first_blocks[block] = self._asked_for()
        self._visit(block)

    def split(self, upper: int, lower: int) -> None:
        first = self._first_blocks[upper] = self._asked_for()
        # The trace has no name for where the rest begins: a return of the rest alone is not recognised.
        self.nodes.split(self._first_blocks[lower], first, lower, self._position)
        self._first_blocks[lower] = lower
        self._visit(upper)

    def access(self, block: int) -> None:
        self._visit(block)
        if block in self._candidates:
            self.evictable(block)

    def _asked_for(self) -> int:
        return int(self._trace.blocks[self._start + self._position])

    def _visit(self, block: int) -> None:
        self.nodes.visit(self._first_blocks[block], self._start + self._position, self._position)
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
        del self._first_blocks[block]
        return block

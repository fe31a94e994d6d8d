"""``importance`` where turns rank blocks: the readable form, which defines the fast path.

That is where a trace says how answers ended, and while it is mostly conversations.

A node is ranked by the turn that was the last to visit it (``sgl_importance.reuse.turns``): what its session
went on without goes first, then what returns least often per request. The end of a prefix behind which
sessions parted belongs to none of them and is ranked by its class, as without turns.
"""

from __future__ import annotations

from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.reuse.turns import turn_bucket
from sgl_importance_lab.replay.importance_replay import ImportanceReplayPolicy
from sgl_importance_lab.replay.sessions import BlockFacts, block_facts
from sgl_importance_lab.replay.trace import Trace
from sgl_importance_lab.replay.trace_turns import GONE_ON, TraceTurns


class TurnReplayPolicy(ImportanceReplayPolicy):
    """See ``ImportanceReplayPolicy``, whose arguments these are."""

    def __init__(self, capacity: int, trace: Trace, *, facts: BlockFacts | None = None) -> None:
        facts = facts if facts is not None else block_facts(trace)
        super().__init__(capacity, trace, facts=facts)
        self._turns = TraceTurns(trace, facts)
        self._visited_by: dict[int, int] = {}  # the last turn to visit a node, by the node's name
        self._shared: set[int] = set()
        self._request = 0

    def begin_request(self, request: int) -> None:
        super().begin_request(request)
        self._turns.begin_request(request)
        self._request = request

    def _visit(self, block: int) -> None:
        access = self._start + self._position
        super()._visit(block)
        self._visited_by[block] = self._request
        (self._shared.add if self._turns.is_shared[access] else self._shared.discard)(block)

    def evictable(self, block: int) -> None:
        self._candidates.add(block)

    def held(self, block: int) -> None:
        self._candidates.discard(block)

    def victim(self) -> int:
        block = min(self._candidates, key=lambda block: (self.loss(block), self._visited_by[block]))
        self._candidates.remove(block)
        return block

    def loss(self, block: int) -> float:
        """Visits per admitted request that keeping the node can earn."""
        node: NodeMetadata = self.node(block)
        reuse = self.nodes.policy.reuse
        turn = self._visited_by[block]
        if block in self._shared or not self._turns.ranks[turn]:
            return reuse.index(node.reuse_class, reuse.clock - node.last_access)
        turn_class = int(self._turns.classes[turn])
        if turn_class == GONE_ON:
            return 0.0
        estimator = self._turns.estimator
        age = float(self._trace.seconds[self._request]) - float(self._turns.since[turn])
        return float(estimator.index[turn_class, turn_bucket(age)]) * estimator.seconds_per_request

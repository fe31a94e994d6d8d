"""Facts of a trace's blocks by which the policy ranks them, read off the trace's past."""

from __future__ import annotations

from typing import NamedTuple

from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.nodes.reuse_tracker import ReuseTracker
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.policy.marginal_loss import ImportancePolicy
from sgl_importance.reuse.reuse_class import BlockType, Transition
from sgl_importance_lab.replay.sessions import BlockFacts, block_facts
from sgl_importance_lab.replay.trace import Trace


class Facts(NamedTuple):
    """Facts of a node at a visit.

    Attributes:
        block_type: of the node.
        accesses: earlier requests that asked for it.
        span: admitted requests between its first visit and this one.
        is_evidence: whether its next visit is evidence for its class.
    """

    block_type: BlockType
    accesses: int
    span: int
    is_evidence: bool = True


class ToldTracker(ReuseTracker):
    """Reads nothing off a tree: ``facts`` are those of the visit that is told next."""

    facts: Facts

    def visited(self, node: NodeMetadata, transition: Transition) -> None:
        node.block_type, node.accesses, node.span, is_evidence = self.facts
        if is_evidence:
            super().visited(node, transition)
        else:
            node.transition, node.last_access, node.at_risk_as = transition, self._reuse.clock, None


class TraceNodes:
    """Every block that was asked for so far, in the cache or not, as a node of its own: nothing is forgotten.

    A trace holds no attention, so g is 1.

    Args:
        trace: the trace that is replayed; only its past is used at any moment.
        cost: the cost model of restoring.
        facts: ``block_facts(trace)``, where the caller has them.
    """

    def __init__(self, trace: Trace, cost: CostModel, *, facts: BlockFacts | None = None) -> None:
        self.policy = ImportancePolicy(cost, use_importance=False)
        self._tracker = ToldTracker(self.policy.reuse, page_size=trace.block_tokens)
        self._trace = trace
        self._facts = facts if facts is not None else block_facts(trace)
        self._nodes: dict[int, NodeMetadata] = {}

    def __getitem__(self, block: int) -> NodeMetadata:
        """The node that is known by the block, which a request has asked for."""
        return self._nodes[block]

    def begin_request(self) -> None:
        """The next request is admitted."""
        self.policy.admit()

    def visit(self, block: int, access: int, position: int) -> None:
        """The running request asks for a block.

        Args:
            block: which names the node.
            access: number of the block access in the trace.
            position: blocks in front of it.
        """
        facts = self._facts
        transition = Transition(int(facts.transitions[access]))
        self._tracker.facts = Facts(
            block_type=BlockType(int(facts.block_types[access])),
            accesses=int(facts.accesses[access]),
            span=int(facts.spans[access]),
            is_evidence=bool(facts.is_evidence[access]),
        )
        known = self._nodes.get(block)
        if known is None:
            created = self._nodes[block] = self._create(position)
            self._tracker.created(created, transition)
        else:
            self._tracker.accessed(known, transition)

    def _create(self, position: int) -> NodeMetadata:
        tokens = self._trace.block_tokens
        return NodeMetadata(tokens=tokens, depth=position * tokens, page_size=tokens, clock=self.policy.clock)

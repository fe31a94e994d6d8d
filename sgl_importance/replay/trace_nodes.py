"""One node per block, ranked in all tiers by one policy object, as the server ranks the nodes of its tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from sgl_importance.cost import CostModel, Tier
from sgl_importance.node import NodeMetadata
from sgl_importance.policy.base import EvictionPolicy
from sgl_importance.policy.importance import ImportancePolicy
from sgl_importance.replay.sessions import block_facts
from sgl_importance.replay.trace import Trace
from sgl_importance.reuse_class import BlockType, Transition


class BlockNodes:
    """What the policy knows of every block that was asked for so far, cached or not. g is 1 throughout.

    Args:
        trace: what is replayed; only its past is used at any moment.
        cost: what restoring costs.
    """

    def __init__(self, trace: Trace, cost: CostModel) -> None:
        self.policy = ImportancePolicy(cost, use_importance=False)
        self._trace = trace
        facts = block_facts(trace)
        self._block_types = [BlockType(value) for value in facts.block_types.tolist()]
        self._transitions = [Transition(value) for value in facts.transitions.tolist()]
        self._accesses = facts.accesses.tolist()
        self._spans = facts.spans.tolist()
        self._watched = facts.watched.tolist()
        self._nodes: list[NodeMetadata | None] = [None] * trace.num_blocks

    def __getitem__(self, block: int) -> NodeMetadata:
        node = self._nodes[block]
        assert node is not None, "nobody has asked for the block yet"
        return node

    def begin_request(self, index: int) -> None:
        """The next request asks for its blocks."""
        self.policy.admit()
        start = int(self._trace.offsets[index])
        for position, block in enumerate(self._trace.request(index).tolist()):
            node = self._nodes[block]
            if node is None:
                node = self._nodes[block] = self._create(position)
            elif node.watched_as is not None:
                self.policy.returned(node.watched_as, node.last_access)
            access = start + position
            node.block_type = self._block_types[access]
            node.accesses = self._accesses[access]
            node.span = self._spans[access]
            self.policy.created(node, self._transitions[access], watch=self._watched[access])

    def _create(self, position: int) -> NodeMetadata:
        tokens = self._trace.block_tokens
        return NodeMetadata(tokens=tokens, depth=position * tokens, page_size=tokens, clock=self.policy.clock)


class TierOrder(EvictionPolicy):
    """The order of one tier in a shared ``ImportancePolicy``.

    Args:
        capacity: blocks that the tier can hold.
        tier: which tier.
        nodes: facts about the blocks, shared by all tiers.
        below: the tier that keeps a copy of a block when this one gives it up; None if none does.
    """

    name: ClassVar[str] = "importance"

    def __init__(
        self, capacity: int, tier: Tier, nodes: BlockNodes, below: Callable[[int], Tier | None]
    ) -> None:
        super().__init__(capacity)
        self._tier = tier
        self._nodes = nodes
        self._below = below

    def insert(self, block: int) -> None:
        """Facts are those of the shared nodes."""

    def access(self, block: int) -> None:
        """Facts are those of the shared nodes."""

    def evictable(self, block: int) -> None:
        self._nodes.policy.enter(self._tier, block, self._nodes[block], below=self._below(block))

    def held(self, block: int) -> None:
        self._nodes.policy.leave(self._tier, block)

    def victim(self) -> int:
        block = self._nodes.policy.victim(self._tier)
        assert block is not None
        return block

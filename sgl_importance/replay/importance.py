"""The server's own policy as a replay policy, in the readable form that the fast path is tested against."""

from __future__ import annotations

from typing import ClassVar

from sgl_importance.cost import CostModel, Tier
from sgl_importance.node import NodeMetadata
from sgl_importance.policy.base import EvictionPolicy
from sgl_importance.policy.importance import ImportancePolicy
from sgl_importance.replay.sessions import BlockFacts, block_facts
from sgl_importance.replay.trace import Trace
from sgl_importance.reuse_class import BlockType, Transition

# A hit rate counts every block alike, so a replay for hit rates lets every block cost the same.
UNIFORM_COST = CostModel(
    prefill_seconds_per_token=1.0,
    prefill_seconds_per_token_pair=1e-15,
    bytes_per_token=1,
    host_bytes_per_second=1.0,
    storage_bytes_per_second=1.0,
)


class ImportanceReplayPolicy(EvictionPolicy):
    """Drives ``ImportancePolicy`` with one node per block. A trace holds no attention, so g is 1 throughout.

    Args:
        capacity: blocks that the cache can hold.
        trace: what is replayed; only its past is used at any moment.
        facts: ``block_facts(trace)``, where the caller has them.
        cost: what restoring costs.
        whole_nodes: whether the cache evicts whole nodes, each of which then counts as evidence once.
    """

    name: ClassVar[str] = "importance"

    def __init__(
        self,
        capacity: int,
        trace: Trace,
        *,
        facts: BlockFacts | None = None,
        cost: CostModel = UNIFORM_COST,
        whole_nodes: bool = False,
    ) -> None:
        super().__init__(capacity)
        self.policy = ImportancePolicy(cost, use_importance=False)
        self._trace = trace
        self._facts = facts if facts is not None else block_facts(trace)
        self._whole_nodes = whole_nodes
        self._nodes: dict[int, NodeMetadata] = {}
        # As on the server, a node that returns is recognised from its beginning on.
        self._first_blocks: dict[int, int] = {}
        self._ghosts: dict[int, NodeMetadata] = {}  # by first block
        self._candidates: set[int] = set()
        self._start = 0
        self._position = 0

    def begin_request(self, request: int) -> None:
        self.policy.admit()
        self._start = int(self._trace.offsets[request])
        self._position = 0

    def at(self, position: int) -> None:
        self._position = position

    def insert(self, block: int) -> None:
        node = self._add(block)
        self._visit(node, self._ghosts.pop(self._first_blocks[block], None))

    def split(self, upper: int, lower: int) -> None:
        whole, part = self._nodes[lower], self._add(upper)
        part.watched_as, part.last_access = whole.watched_as, whole.last_access
        if whole.watched_as is not None:
            self.policy.reuse.resumed(whole.watched_as, whole.last_access)
        # The trace has no name for where the rest begins: a return of the rest alone is not recognised.
        self._first_blocks[lower] = lower
        self._visit(part, part)

    def _add(self, block: int) -> NodeMetadata:
        self._first_blocks[block] = int(self._trace.blocks[self._start + self._position])
        node = self._nodes[block] = NodeMetadata(
            tokens=self._trace.block_tokens,
            depth=self._position * self._trace.block_tokens,
            page_size=self._trace.block_tokens,
            clock=self.policy.clock,
        )
        return node

    def access(self, block: int) -> None:
        node = self._nodes[block]
        self._visit(node, node)
        if block in self._candidates:
            self.evictable(block)

    def _visit(self, node: NodeMetadata, before: NodeMetadata | None) -> None:
        """The block is accessed next; ``before`` is what was known of it until now."""
        if before is not None and before.watched_as is not None:
            self.policy.returned(before.watched_as, before.last_access)
        access = self._start + self._position
        node.block_type = BlockType(int(self._facts.block_types[access]))
        node.accesses = int(self._facts.accesses[access])
        node.span = int(self._facts.spans[access])
        watch = self._whole_nodes or bool(self._facts.watched[access])
        self.policy.created(node, Transition(int(self._facts.transitions[access])), watch=watch)
        self._position += 1

    def evictable(self, block: int) -> None:
        self._candidates.add(block)
        self.policy.enter(Tier.DEVICE, block, self._nodes[block], below=None)

    def held(self, block: int) -> None:
        self._candidates.discard(block)
        self.policy.leave(Tier.DEVICE, block)

    def victim(self) -> int:
        block = self.policy.victim(Tier.DEVICE)
        assert block is not None
        self._candidates.discard(block)
        self._ghosts[self._first_blocks.pop(block)] = self._nodes.pop(block)
        return block

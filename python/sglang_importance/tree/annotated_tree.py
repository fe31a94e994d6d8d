"""Upstream's tree with our metadata on its nodes, and the ghosts of nodes that left it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from sgl_importance.calibration import HORIZON
from sgl_importance.ghost import Eviction, GhostNode, GhostTable, chain_digests, iterate_chain, root_digest
from sgl_importance.node import NodeMetadata
from sgl_importance.placement.hinted import LostPages
from sgl_importance.policy.importance import ImportancePolicy
from sgl_importance.reuse_class import Transition
from sglang_importance.metrics.scheduler_counters import Counters
from sglang_importance.tree.page_lookup import PageSource

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, UnifiedTreeNode
    from sglang.srt.mem_cache.unified_radix_cache import NodeId

METADATA_ATTRIBUTE = "importance_metadata"


class AnnotatedTree:
    """Finds and keeps the metadata of nodes. Changes nothing of the tree itself.

    Args:
        page_size: tokens per page.
        policy: its clock dates nodes; it learns from ghosts.
        counters: where tokens are counted that only importance would have kept.
        ghost_pages: pages to remember after their removal.
    """

    def __init__(
        self, page_size: int, policy: ImportancePolicy, counters: Counters, *, ghost_pages: int
    ) -> None:
        self.page_size = page_size
        self.ghosts = GhostTable(ghost_pages, on_return=self._ghost_returned, on_expire=self._ghost_expired)
        self.source = PageSource(self, self.ghosts)
        self._policy = policy
        self._counters = counters
        self._core: UnifiedTreeCore | None = None
        self.transition = Transition.COLD
        """Of the request that is inserting."""
        self.on_created: Callable[[UnifiedTreeNode, NodeMetadata], None] | None = None
        """Told of each node's metadata when they are made."""
        self.lost: list[LostPages] | None = None
        """Takes what the request that is inserting had to compute again; None where nobody asks."""
        self.warming = False
        """Whether nodes are made because of a pre-warm, which says nothing about their reuse."""

    @property
    def core(self) -> UnifiedTreeCore:
        assert self._core is not None, "watch a tree core first"
        return self._core

    def watch(self, core: UnifiedTreeCore) -> None:
        """Follows a tree core that has just been reset; what was known of the old tree is forgotten."""
        self._core = core
        self.ghosts.clear()
        self.source.reset()

    # ---- nodes ----

    def metadata(self, node: UnifiedTreeNode) -> NodeMetadata:
        """The node's metadata; made on the first call, with what ghosts remember of its pages."""
        known = self.known(node)
        if known is not None:
            return known
        assert node.parent is not None, "the root holds no tokens"
        created = NodeMetadata(
            tokens=len(node.key),
            depth=self._end_depth(node.parent),
            page_size=self.page_size,
            clock=self._policy.clock,
        )
        setattr(node, METADATA_ATTRIBUTE, created)
        self.source.created(node)
        revived = 0
        if len(self.ghosts):
            revived = self.ghosts.revive(self.iterate_pages(node), created)
        if not revived and node.parent.parent is not None:
            self._policy.continued(self.metadata(node.parent))
        created.is_prewarmed = self.warming
        if not self.warming:
            self._policy.created(created, self.transition)
            self._predict(created)
        if self.on_created is not None:
            self.on_created(node, created)
        return created

    def accessed(self, metadata: NodeMetadata, transition: Transition) -> None:
        """An admitted request found the node in the cache."""
        self._came_true(metadata)
        self._policy.accessed(metadata, transition)
        self._predict(metadata)

    def _predict(self, metadata: NodeMetadata) -> None:
        """A visit, of which some are compared with what follows."""
        calibration = self._counters.calibration
        if calibration.wants():
            probability = self._policy.reuse.probability_within(metadata.reuse_class, 1, HORIZON)
            metadata.prediction = calibration.predict(probability, self._policy.clock)

    @staticmethod
    def _came_true(visited: NodeMetadata | GhostNode) -> None:
        if visited.prediction is not None:
            visited.prediction.came_true = True
            visited.prediction = None

    @staticmethod
    def known(node: UnifiedTreeNode) -> NodeMetadata | None:
        """The node's metadata if it was made already."""
        metadata: NodeMetadata | None = getattr(node, METADATA_ATTRIBUTE, None)
        return metadata

    @staticmethod
    def path(node: UnifiedTreeNode) -> list[UnifiedTreeNode]:
        """Nodes from below the root down to ``node``."""
        nodes = []
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def path_to(self, node_id: NodeId | None) -> list[UnifiedTreeNode]:
        """Nodes from below the root down to the one of this id; none where it is None or left the tree."""
        node = None if node_id is None else self.core._node_arena.get(node_id)
        return [] if node is None else self.path(node)

    def nodes(self) -> Iterator[UnifiedTreeNode]:
        """Every node but the root, parents before children."""
        stack = list(self.core.root_node.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def __contains__(self, node: UnifiedTreeNode) -> bool:
        return node.id in self.core._node_arena

    def _end_depth(self, node: UnifiedTreeNode) -> int:
        if node.parent is None:
            return 0
        metadata = self.metadata(node)
        return metadata.depth + metadata.tokens

    # ---- events ----

    def split(self, new_parent: UnifiedTreeNode, child: UnifiedTreeNode) -> None:
        """``child`` was cut: its first tokens are ``new_parent`` now."""
        known = self.known(child)
        if known is not None:
            prefix = self._policy.split(known, len(new_parent.key), self.page_size)
            setattr(new_parent, METADATA_ATTRIBUTE, prefix)
            self.source.split(new_parent, child)

    def removed(
        self, node: UnifiedTreeNode, *, kept_by_importance: bool, eviction: Eviction | None = None
    ) -> None:
        """The node leaves the tree; its parent is still linked."""
        self.ghosts.remember(
            self.page_digests(node),
            self.metadata(node),
            kept_by_importance=kept_by_importance,
            eviction=eviction,
        )
        self.source.removed(node)

    # ---- ghosts ----

    def page_digests(self, node: UnifiedTreeNode) -> list[bytes]:
        """Chained digests of the node's pages."""
        assert node.parent is not None
        digests = chain_digests(self._end_digest(node.parent, node), node.key.raw_token_ids(), self.page_size)
        self.metadata(node).digest = digests[-1]
        return digests

    def iterate_pages(self, node: UnifiedTreeNode) -> Iterator[bytes]:
        """Chained digests of the node's pages, each computed when it is asked for."""
        assert node.parent is not None
        start = self._end_digest(node.parent, node)
        return iterate_chain(start, node.key.raw_token_ids(), self.page_size)

    def end_digest(self, node: UnifiedTreeNode) -> bytes:
        """Chained digest of the node's last page: it names everything up to the node's end."""
        return self._end_digest(node, node)

    def start_digest(self, node: UnifiedTreeNode) -> bytes:
        """Chained digest of what is in front of the node; the root's where nothing is."""
        assert node.parent is not None
        return self._end_digest(node.parent, node)

    def _end_digest(self, node: UnifiedTreeNode, below: UnifiedTreeNode) -> bytes:
        """Digest of everything up to the node's end, cached on it; the root's is ``below``'s namespace."""
        missing = []
        digest = root_digest(below.key.extra_key, below.key.cache_salt)
        for step in reversed(self.path(node)):
            known = self.metadata(step).digest
            if known is not None:
                digest = known
                break
            missing.append(step)
        for step in reversed(missing):
            digest = chain_digests(digest, step.key.raw_token_ids(), self.page_size)[-1]
            self.metadata(step).digest = digest
        return digest

    def _ghost_returned(self, ghost: GhostNode, node: NodeMetadata, pages: int) -> None:
        if self.warming:
            self._policy.inherited(node, ghost, pages * self.page_size)
            return
        self._came_true(ghost)
        if ghost.kept_by_importance:
            self._counters.observed_saved_tokens += pages * self.page_size
        if self.lost is not None and ghost.eviction is not None:
            self.lost.append(LostPages(pages * self.page_size, ghost.eviction))
        self._policy.recalled(node, ghost, pages * self.page_size)

    def _ghost_expired(self, ghost: GhostNode) -> None:
        if ghost.watched_as is not None:
            self._policy.forgotten(ghost.watched_as, ghost.last_access)

    def check_integrity(self) -> None:
        """Asserts that what is known of each node agrees with the tree."""
        for node in self.nodes():
            known = self.known(node)
            if known is None:
                continue
            assert known.tokens == len(node.key), (node.id, known.tokens, len(node.key))
            assert known.depth == self._end_depth(node.parent), node.id
            assert known.importance.num_pages * self.page_size == known.tokens, node.id
        self.source.check_integrity()

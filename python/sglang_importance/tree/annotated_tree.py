"""Upstream's tree with our metadata on its nodes, and the ghosts of nodes that left it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, UnifiedTreeNode

from sgl_importance.nodes.ages import NOWHERE
from sgl_importance.nodes.digests import iterate_chain, root_digest
from sgl_importance.nodes.ghosts import Eviction, GhostNode
from sgl_importance.nodes.named_sessions import Session, owner_of_ghosts
from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.nodes.reuse_tracker import ReuseTracker
from sgl_importance.nodes.turn_tracker import TurnTracker
from sgl_importance.placement.hints.hinted_request import LostPages
from sgl_importance.policy.marginal_loss import ImportancePolicy
from sgl_importance.reuse.calibration import HORIZON
from sgl_importance.reuse.reuse_class import Transition
from sgl_importance.tiers import Tier
from sglang_importance.metrics.scheduler_counters import Counters
from sglang_importance.tree.insertion import Insertion
from sglang_importance.tree.page_lookup import PageSource
from sglang_importance.upstream.nodes import NodeId, key_of

METADATA_ATTRIBUTE = "importance_metadata"


class AnnotatedTree:
    """Finds and keeps the metadata of nodes. Does not change the tree itself.

    Args:
        page_size: tokens per page.
        policy: its clock dates nodes; its reuse estimator learns from their visits.
        counters: where tokens are counted that only importance would have kept.
        ghost_pages: pages to remember after their removal.
    """

    def __init__(
        self, page_size: int, policy: ImportancePolicy, counters: Counters, *, ghost_pages: int
    ) -> None:
        self.page_size = page_size
        self.tracker = ReuseTracker(policy.reuse, page_size=page_size, ghost_pages=ghost_pages)
        """Follows visits, splits and removals of nodes for the estimator."""
        self.turns = TurnTracker(policy.turns, page_size=page_size, on_change=policy.turn_changed)
        """Follows finished requests."""
        self.ghosts = self.tracker.ghosts
        self.source = PageSource(self, self.ghosts)
        self._policy = policy
        self._counters = counters
        self._core: UnifiedTreeCore | None = None

    @property
    def core(self) -> UnifiedTreeCore:
        assert self._core is not None, "watch a tree core first"
        return self._core

    @property
    def has_paired_keys(self) -> bool:
        """Whether each token is looked up with the one behind it: drafts of EAGLE depend on both."""
        return bool(self.core.is_eagle)

    def watch(self, core: UnifiedTreeCore) -> None:
        """Follows a tree core that has just been reset; metadata and ghosts of the old tree are forgotten."""
        self._core = core
        self.ghosts.clear()
        self.source.reset()

    # ---- nodes ----

    @staticmethod
    def known(node: UnifiedTreeNode) -> NodeMetadata | None:
        """The node's metadata; None for a new node before ``take_in``."""
        metadata: NodeMetadata | None = getattr(node, METADATA_ATTRIBUTE, None)
        return metadata

    def metadata(self, node: UnifiedTreeNode) -> NodeMetadata:
        """The metadata of a node that was taken in."""
        known: NodeMetadata | None = getattr(node, METADATA_ATTRIBUTE, None)  # asked a dozen times a request
        assert known is not None, f"node {node.id} was never taken in"
        return known

    def take_in(self, node: UnifiedTreeNode, insertion: Insertion) -> NodeMetadata:
        """Makes the metadata of a new node, with the ghosts of its pages; the estimator learns of it."""
        assert self.known(node) is None, f"node {node.id} was taken in already"
        assert node.parent is not None, "the root holds no tokens"
        parent = self.metadata(node.parent) if node.parent.parent is not None else None
        created = NodeMetadata(
            tokens=len(key_of(node)),
            depth=self._end_depth(node.parent),
            page_size=self.page_size,
            clock=self._policy.clock,
        )
        setattr(node, METADATA_ATTRIBUTE, created)
        self.source.created(node)
        pages = self.iterate_pages(node)
        is_admitted = not insertion.is_from_storage
        returned = self.tracker.created(
            created, insertion.transition, parent=parent, pages=pages, is_admitted=is_admitted
        )
        created.session = _session_of(insertion, [ghost for ghost, _ in returned])
        created.is_prewarmed = insertion.is_prewarm
        if not insertion.is_prewarm:
            place = Tier.STORAGE if insertion.is_from_storage else NOWHERE
            self._asked_again(returned, place, insertion.lost)
            if is_admitted:
                self._predict(created)
        return created

    def _asked_again(
        self, returned: Sequence[tuple[GhostNode, int]], place: str, lost: list[LostPages] | None
    ) -> None:
        """Counts tokens that the tree held before: a request had to compute them, or storage had them."""
        for ghost, tokens in returned:
            self._counters.ages.asked_again(place, tokens, ghost.last_access)
            self._came_true(ghost)
            if lost is not None and ghost.eviction is not None:
                lost.append(LostPages(tokens, ghost.eviction))

    def accessed(self, metadata: NodeMetadata, transition: Transition) -> None:
        """An admitted request found the node in the cache."""
        self._came_true(metadata)
        self.tracker.accessed(metadata, transition)
        self._predict(metadata)

    def _predict(self, metadata: NodeMetadata) -> None:
        """A visit; predictions at a sample of the visits are compared with the outcome."""
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

    def covered(self, key: RadixKey) -> list[UnifiedTreeNode]:
        """Nodes that end within a text, from below the root down.

        Where a model has further state beside its KV (windows, linear attention), a match ends with the last
        node that a request could go on from; nodes below it may hold KV of the text all the same.

        Args:
            key: of whole pages.
        """
        return [node for node, matched in self.matching(key) if matched == len(key_of(node))]

    def matching(self, key: RadixKey) -> Iterator[tuple[UnifiedTreeNode, int]]:
        """Nodes that hold the beginning of a text, with how many tokens of each, in whole pages.

        Only of the last node may fewer match than it has.

        Args:
            key: of whole pages.
        """
        rest, _ = key.maybe_to_bigram_view(self.core.is_eagle)
        node = self.core.root_node
        while len(rest) > 0 and (child := node.children.get(rest.child_key(self.page_size))) is not None:
            matched = key_of(child).match(rest, self.page_size)
            yield child, matched
            if matched < len(key_of(child)):
                return
            node, rest = child, rest[matched:]

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
            setattr(new_parent, METADATA_ATTRIBUTE, self.tracker.split(known, len(key_of(new_parent))))
            self.source.split(new_parent, child)

    def tail_cut(self, front: UnifiedTreeNode, tail: UnifiedTreeNode, digests: list[bytes]) -> None:
        """``tail`` was split off ``front`` to be evicted; ``digests``: of the pages of both."""
        left, gone = self.metadata(front), self.metadata(tail)
        self.tracker.tail_cut(left, gone)
        pages = left.tokens // self.page_size
        left.page_digests, gone.page_digests = digests[:pages], digests[pages:]
        left.digest = digests[pages - 1]

    def removed(self, node: UnifiedTreeNode, eviction: Eviction | None = None) -> None:
        """The node leaves the tree; its parent is still linked."""
        metadata, parent = self.metadata(node), node.parent
        if (session := metadata.session) is not None:
            above = None if parent is None else self.known(parent)
            is_own = parent is not None and above is not None and above.session is session
            session.left(node.id, parent.id if parent is not None and is_own else None)
        self.tracker.removed(metadata, self.page_digests(node), eviction)
        self.source.removed(node)

    # ---- digests ----

    def page_digests(self, node: UnifiedTreeNode) -> list[bytes]:
        """Chained digests of the node's pages."""
        metadata = self.metadata(node)
        digests = metadata.page_digests or list(self._chain(self.start_digest(node), node))
        metadata.digest = digests[-1]
        return digests

    def iterate_pages(self, node: UnifiedTreeNode) -> Iterator[bytes]:
        """Chained digests of the node's pages; nothing is hashed before the first is asked for."""
        yield from self._chain(self.start_digest(node), node)

    def end_digest(self, node: UnifiedTreeNode) -> bytes:
        """Chained digest of the node's last page: it names everything up to the node's end."""
        return self._end_digest(node, node)

    def start_digest(self, node: UnifiedTreeNode) -> bytes:
        """Chained digest of the pages in front of the node; the root's where there are none."""
        assert node.parent is not None
        return self._end_digest(node.parent, node)

    def _end_digest(self, node: UnifiedTreeNode, below: UnifiedTreeNode) -> bytes:
        """Digest of everything up to the node's end, cached on it; the root's is ``below``'s namespace."""
        missing = []
        digest = None
        while node.parent is not None and (digest := self.metadata(node).digest) is None:
            missing.append(node)
            node = node.parent
        if digest is None:
            digest = root_digest(key_of(below).extra_key, key_of(below).cache_salt)
        for step in reversed(missing):
            *_, digest = self._chain(digest, step)
            self.metadata(step).digest = digest
        return digest

    def _chain(self, start: bytes, node: UnifiedTreeNode) -> Iterator[bytes]:
        # Two pages of the same tokens are two nodes where keys are pairs, and other tokens follow.
        ahead = int(self.core.is_eagle)
        return iterate_chain(start, key_of(node).raw_token_ids(), self.page_size, ahead=ahead)

    def check_integrity(self) -> None:
        """Asserts that the metadata of each node agrees with the tree."""
        for node in self.nodes():
            known = self.known(node)
            if known is None:
                continue
            assert known.tokens == len(key_of(node)), (node.id, known.tokens, len(key_of(node)))
            assert node.parent is not None
            assert known.depth == self._end_depth(node.parent), node.id
            assert known.importance.num_pages * self.page_size == known.tokens, node.id
        self.source.check_integrity()


def _session_of(insertion: Insertion, ghosts: Sequence[GhostNode]) -> Session | None:
    """Whose alone a new node is, by who brings it, and who had asked for its ghosts."""
    session = insertion.session
    if insertion.rid is None and ghosts:  # from storage, for a request that has yet to find it
        session = ghosts[0].session
    return owner_of_ghosts(ghosts, session)

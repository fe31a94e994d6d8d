"""The one adapter between a prefix tree and the reuse estimator: visits, splits, evictions, returns.

A node is *at risk* of its next visit from its making or last visit on, in the class that it had then
(``NodeMetadata.at_risk_as``). A visit ends that interval and begins the next. A ghost carries it on after an
eviction until the next request for it, or until the ghost is forgotten, which is no evidence. The
server's tree, the shadow caches and the replays of traces all drive a ``ReuseTracker``;
docs/evidence/replay.md lists where they differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sgl_importance.nodes.ghosts import Eviction, GhostNode, GhostTable
from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance.reuse.estimator import ReuseEstimator
from sgl_importance.reuse.reuse_class import BlockType, Transition, answer_end_of, transition_of


class ReuseTracker:
    """Keeps the facts from which a node's reuse is predicted, and tells the estimator of visits.

    They are read off the tree as it stands: accesses are hits, a node that two texts followed is a shared
    prefix, and text behind a request's prompt is generated.

    Args:
        reuse: learns from every visit; its clock counts admitted requests.
        page_size: tokens per page.
        ghost_pages: pages to remember after their node was removed.
    """

    def __init__(self, reuse: ReuseEstimator, *, page_size: int, ghost_pages: int = 0) -> None:
        self.page_size = page_size
        self.ghosts = GhostTable(ghost_pages, on_expire=self._forgotten)
        self._reuse = reuse

    # ---- visits ----

    def created(
        self,
        node: NodeMetadata,
        transition: Transition | None,
        *,
        parent: NodeMetadata | None = None,
        pages: Iterable[bytes] = (),
        is_admitted: bool = True,
    ) -> list[tuple[GhostNode, int]]:
        """A node came into the tree.

        Args:
            node: its metadata, just made.
            transition: of the request that brought it; None where no request asked for it (a pre-warm): then
                it is at risk as it was when it left.
            parent: the node that it continues; None below the root.
            pages: chained digests of its pages, read as far as there are ghosts.
            is_admitted: whether the request is; else storage brought the node ahead of that, and the
                admission will be the visit (``accessed``).

        Returns:
            Each ghost that came back in it, with the number of its tokens.
        """
        revived = self.ghosts.revive(pages, node) if len(self.ghosts) else []
        returned = [(ghost, num_pages * self.page_size) for ghost, num_pages in revived]
        for ghost, tokens in returned:
            node.turn = ghost.turn
            if transition is None:
                self._restored(node, ghost, tokens)
            else:
                self._asked_again(node, ghost, tokens, visits=int(is_admitted))
            ghost.resolved = True
        if not returned and parent is not None:
            self._continued(parent)
        if transition is not None and is_admitted:
            self.visited(node, transition)
        return returned

    def accessed(self, node: NodeMetadata, transition: Transition) -> None:
        """An admitted request, of this transition, found the node in the cache."""
        if node.at_risk_as is not None:
            self._reuse.hit(node.at_risk_as, node.last_access)
        node.expendable = node.is_demoted = False  # it was asked for again after all
        node.accesses += 1
        node.span += self._reuse.clock - node.last_access
        self.visited(node, transition)

    def visited(self, node: NodeMetadata, transition: Transition) -> None:
        """The node is at risk of its next visit from now on."""
        node.transition = transition
        node.answer_end = AnswerEnd.UNKNOWN
        node.last_access = self._reuse.clock
        node.at_risk_as = node.reuse_class
        self._reuse.began(node.at_risk_as)

    def ended(
        self, path: Sequence[NodeMetadata], *, serial: int, prompt_tokens: int, is_finished: bool
    ) -> None:
        """The prefill of a request, or the request, ended.

        Args:
            path: its nodes in the tree, root side first.
            serial: of the request; ``importance.creator`` of the nodes that it brought.
            prompt_tokens: length of its prompt; the page in which it ends belongs to the answer.
            is_finished: whether the answer is in the tree, too.
        """
        if path:
            path[-1].is_tip = True
        if not is_finished:
            return
        prompt_pages_end = prompt_tokens // self.page_size * self.page_size
        for node in reversed(path):
            if node.depth < prompt_pages_end or node.importance.creator != serial:
                break
            self.holds(node, BlockType.GENERATED)

    def answered(self, path: Sequence[NodeMetadata], answer_end: AnswerEnd) -> None:
        """It became known how the answer of the last request on this path ended; UNKNOWN says nothing.

        Their at-risk intervals go on in the classes of that end, from their present ages on.
        """
        if answer_end is AnswerEnd.UNKNOWN:
            return
        for node in path:
            node.answer_end = answer_end
            self._reclassify(node)

    def over(self, node: NodeMetadata) -> None:
        """The only session that asked for the node has said that it is over: its interval is censored."""
        self._censor(node)
        node.expendable = True

    def _censor(self, node: NodeMetadata) -> None:
        if node.at_risk_as is not None:
            self._reuse.forgotten(node.at_risk_as, node.last_access)
            node.at_risk_as = None

    # ---- what a node holds ----

    def holds(self, node: NodeMetadata, block_type: BlockType) -> None:
        """The node's block type became known."""
        if node.block_type is block_type:
            return
        node.block_type = block_type
        self._reclassify(node)

    def _continued(self, node: NodeMetadata) -> None:
        """A new continuation follows the node."""
        node.continuations += 1
        if node.continuations >= 2:
            self.holds(node, BlockType.SHARED_PREFIX)

    def _reclassify(self, node: NodeMetadata) -> None:
        """The node's at-risk interval goes on in its present class."""
        if node.at_risk_as is not None and node.at_risk_as != (present := node.reuse_class):
            self._reuse.reclassified(node.at_risk_as, present, node.last_access)
            node.at_risk_as = present

    # ---- nodes that are cut, leave and come back ----

    def split(self, node: NodeMetadata, prefix_tokens: int) -> NodeMetadata:
        """Cuts the first ``prefix_tokens`` off into the returned node; both are at risk as the whole was."""
        prefix = node.split(prefix_tokens, self.page_size)
        self.also_at_risk(prefix, node)
        self._reclassify(node)
        return prefix

    def tail_cut(self, front: NodeMetadata, tail: NodeMetadata) -> None:
        """``tail`` was split off ``front`` to be evicted: the life of the node goes on with its front, as
        evidence once, and a turn that ended with the node still does."""
        self._censor(tail)
        front.is_tip = tail.is_tip
        front.prediction, tail.prediction = tail.prediction, None

    def also_at_risk(self, part: NodeMetadata, whole: NodeMetadata | GhostNode) -> None:
        """``part`` is at risk from now on as ``whole`` is, which goes on being so."""
        part.at_risk_as, part.last_access = whole.at_risk_as, whole.last_access
        if whole.at_risk_as is not None:
            self._reuse.resumed(whole.at_risk_as, whole.last_access)

    def removed(
        self,
        node: NodeMetadata,
        pages: Sequence[bytes],
        eviction: Eviction | None = None,
    ) -> None:
        """The node left the tree.

        Args:
            pages: chained digests of its pages.
            eviction: how it was lost; None where that is not known.
        """
        self.ghosts.remember(pages, node, eviction)

    def _asked_again(self, node: NodeMetadata, ghost: GhostNode, tokens: int, *, visits: int) -> None:
        """A request asked for the next ``tokens`` tokens of a node, which this ghost's node had held.

        Args:
            visits: that this is; 0 where its admission will count it.
        """
        span = ghost.span + self._reuse.clock - ghost.last_access
        node.recall(tokens, accesses=ghost.accesses + visits, span=span, block_type=ghost.block_type)
        if not ghost.resolved and ghost.at_risk_as is not None:
            self._reuse.hit(ghost.at_risk_as, ghost.last_access)

    def _restored(self, node: NodeMetadata, ghost: GhostNode, tokens: int) -> None:
        """An evicted node is back without a request for it."""
        node.recall(tokens, accesses=ghost.accesses, span=ghost.span, block_type=ghost.block_type)
        if ghost.at_risk_as is None:
            return
        if node.at_risk_as is not None:  # of the ghost before this one
            self._reuse.forgotten(node.at_risk_as, node.last_access)
        node.transition = transition_of(ghost.at_risk_as)
        node.answer_end = answer_end_of(ghost.at_risk_as)
        if ghost.resolved:
            self.also_at_risk(node, ghost)
        else:
            node.at_risk_as, node.last_access = ghost.at_risk_as, ghost.last_access

    def _forgotten(self, ghost: GhostNode) -> None:
        """The node's ghost is forgotten: a return would not be recognised."""
        if ghost.at_risk_as is not None:
            self._reuse.forgotten(ghost.at_risk_as, ghost.last_access)

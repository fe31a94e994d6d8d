"""Facts of one radix-tree node, by which policies rank it; independent of the tree itself."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from sgl_importance.nodes.named_sessions import Session
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance.reuse.calibration import Prediction
from sgl_importance.reuse.reuse_class import BlockType, Transition, reuse_class, visit_level
from sgl_importance.reuse.turns import Turn
from sgl_importance.signal.node_importance import NodeImportance
from sgl_importance.tiers import Tier

NOT_PINNED: Mapping[Tier, float] = MappingProxyType({})


class PriorSegment(NamedTuple):
    """Facts of a node's first tokens from before an eviction, after which the node was made anew.

    Attributes:
        end: where they end, in tokens from the node's start; they begin where the segment before them ends.
        accesses: visits until then, its return included.
        span: admitted requests between its first visit and its return.
        block_type: of the tokens at that time.
    """

    end: int
    accesses: int
    span: int
    block_type: BlockType


_NO_SEGMENT = PriorSegment(0, 0, 0, BlockType.USER)


class NodeMetadata:
    """Facts about one node, kept while it lives on any tier.

    Attributes:
        tokens: tokens that the node holds.
        depth: tokens between the root and the node.
        importance: accumulated attention of its pages.
        block_type: the kind of text that it holds.
        transition: of the last request that visited it.
        answer_end: how the answer of that request ended; UNKNOWN while it runs.
        turn: the last finished request that visited it.
        is_parted: whether sessions parted at its end: what becomes of one of them says little about it.
        continuations: different texts that followed it.
        is_tip: whether an earlier request's path ended at its end.
        at_risk_as: class of its at-risk interval, which began at ``last_access``; None where there is none.
        accesses: admitted requests that found the node in the cache.
        last_access: clock of the last such request, or of the insertion; in admitted requests.
        span: admitted requests between its first visit and its last, evictions in between included.
        off_device: whether only lower tiers hold it.
        evicted_from: the last tier that gave its copy up; None where none did.
        is_prewarmed: whether a pre-warm brought it, and no request has asked for it since.
        prediction: of its next visit, where the last one was sampled.
        in_storage: whether a copy is in the storage tier, or on its way.
        prior_segments: facts of its first tokens, from ghosts. A prefix that many asked for comes back in one
            node with a new suffix; a split leaves the suffix only its own facts.
        expendable: whether somebody said that it will not be asked for again: the request that brought it, or
            its session, which is over.
        session: the only session that has asked for it; None where others have too, or none.
        lacks_state: linear attention only: whether neither its end nor what follows had a state when it was
            ranked last, so that no request can go on from its KV.
        pin_octaves: log2 of the soft pin's bias, by the tiers where the whole node is pinned.
        is_demoted: whether who asked for it said that it may leave the device first, for a lower tier.
        digest: chained hash of the tokens up to the node's end; None until it is first needed.
        page_digests: chained hashes of its pages, where a tail was cut off it: it may soon be cut again.
    """

    __slots__ = (
        "accesses",
        "answer_end",
        "at_risk_as",
        "block_type",
        "continuations",
        "depth",
        "digest",
        "evicted_from",
        "expendable",
        "importance",
        "in_storage",
        "is_demoted",
        "is_parted",
        "is_prewarmed",
        "is_tip",
        "lacks_state",
        "last_access",
        "off_device",
        "page_digests",
        "pin_octaves",
        "prediction",
        "prior_segments",
        "session",
        "span",
        "tokens",
        "transition",
        "turn",
    )

    def __init__(self, *, tokens: int, depth: int, page_size: int, clock: int) -> None:
        assert tokens > 0
        assert tokens % page_size == 0, f"{tokens} tokens are not whole pages of {page_size}"
        self.tokens = tokens
        self.depth = depth
        self.importance = NodeImportance(tokens // page_size)
        self.block_type = BlockType.USER
        self.transition = Transition.COLD
        self.answer_end = AnswerEnd.UNKNOWN
        self.turn: Turn | None = None
        self.session: Session | None = None
        self.is_parted = False
        self.continuations = 0
        self.is_tip = False
        self.at_risk_as: int | None = None
        self.accesses = 0
        self.last_access = clock
        self.span = 0
        self.prior_segments: tuple[PriorSegment, ...] = ()
        self.off_device = False
        self.evicted_from: Tier | None = None
        self.in_storage = False
        self.is_prewarmed = False
        self.prediction: Prediction | None = None
        self.expendable = False
        self.is_demoted = False
        self.lacks_state = False
        self.pin_octaves = NOT_PINNED
        self.digest: bytes | None = None
        self.page_digests: list[bytes] | None = None

    @property
    def reuse_class(self) -> int:
        level = visit_level(self.accesses, self.span)
        return reuse_class(self.block_type, self.transition, level, self.answer_end)

    @property
    def ranking_turn(self) -> Turn | None:
        """Its turn, where turns ranked nodes when that began."""
        return self.turn if self.turn is not None and self.turn.ranks else None

    @property
    def is_given_back(self) -> bool:
        """Whether only one session had asked for it, which is over."""
        return self.expendable and self.session is not None and self.session.is_closed

    def recall(self, tokens: int, *, accesses: int, span: int, block_type: BlockType) -> None:
        """The next ``tokens`` tokens, behind those recalled already, were known before."""
        start = self.prior_segments[-1].end if self.prior_segments else 0
        self.prior_segments += (PriorSegment(start + tokens, accesses, span, block_type),)
        if len(self.prior_segments) == 1:
            self._count_segment(_NO_SEGMENT, self.prior_segments[0])

    def _count_segment(self, before: PriorSegment, after: PriorSegment) -> None:
        self.accesses += after.accesses - before.accesses
        self.span += after.span - before.span
        if self.block_type is before.block_type:
            is_shared = self.continuations >= 2
            self.block_type = BlockType.SHARED_PREFIX if is_shared else after.block_type

    def split(self, prefix_tokens: int, page_size: int) -> NodeMetadata:
        """Cuts the first ``prefix_tokens`` off into the returned node; this one keeps the rest."""
        assert prefix_tokens % page_size == 0
        prefix = NodeMetadata(
            tokens=prefix_tokens, depth=self.depth, page_size=page_size, clock=self.last_access
        )
        prefix.importance = self.importance.split(prefix_tokens // page_size)
        prefix.block_type = self.block_type
        prefix.transition = self.transition
        prefix.answer_end = self.answer_end
        prefix.turn = self.turn
        prefix.session = self.session
        prefix.continuations = 1
        prefix.accesses = self.accesses
        prefix.span = self.span
        prefix.prior_segments, self.prior_segments = _split_prior_segments(self.prior_segments, prefix_tokens)
        if prefix.prior_segments and self.prior_segments[:1] != prefix.prior_segments[:1]:
            behind = self.prior_segments[0] if self.prior_segments else _NO_SEGMENT
            self._count_segment(prefix.prior_segments[0], behind)
        prefix.off_device = self.off_device
        prefix.in_storage = self.in_storage
        prefix.is_prewarmed = self.is_prewarmed
        prefix.expendable = self.expendable
        prefix.is_demoted = self.is_demoted
        prefix.lacks_state = self.lacks_state
        prefix.pin_octaves = self.pin_octaves
        if self.page_digests is not None:
            pages = prefix_tokens // page_size
            prefix.page_digests, self.page_digests = self.page_digests[:pages], self.page_digests[pages:]
        self.tokens -= prefix_tokens
        self.depth += prefix_tokens
        return prefix


def _split_prior_segments(
    segments: tuple[PriorSegment, ...], at: int
) -> tuple[tuple[PriorSegment, ...], tuple[PriorSegment, ...]]:
    ends = [segment.end for segment in segments]
    first_behind = bisect_right(ends, at)
    before = segments[:first_behind]
    if first_behind < len(segments) and at > (ends[first_behind - 1] if first_behind else 0):
        before += (segments[first_behind]._replace(end=at),)
    return before, tuple(segment._replace(end=segment.end - at) for segment in segments[first_behind:])


def transition_after(last_hit: NodeMetadata | None) -> Transition:
    """The transition of a request, from the last node that it found.

    Args:
        last_hit: the deepest node of the request's path that was in the cache before it; None if none was.
    """
    if last_hit is None:
        return Transition.COLD
    if last_hit.continuations >= 2:
        return Transition.NEW_SESSION
    if last_hit.is_tip or last_hit.block_type is BlockType.GENERATED:
        return Transition.NEXT_TURN
    if last_hit.block_type is BlockType.SHARED_PREFIX:
        return Transition.NEW_SESSION  # a shared prefix that came back: its continuations are forgotten
    return Transition.BRANCH

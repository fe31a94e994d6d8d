"""Eviction orders of shadow caches: stock's recency, and the server's own importance policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from sgl_importance.nodes.named_sessions import SessionName
from sgl_importance.nodes.node_metadata import NodeMetadata, transition_after
from sgl_importance.nodes.reuse_tracker import ReuseTracker
from sgl_importance.nodes.turn_tracker import TurnTracker
from sgl_importance.observe.shadow.shadow_node import ShadowNode
from sgl_importance.observe.shadow.shadow_sessions import ShadowSessions
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.policy.marginal_loss import ImportancePolicy
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance.reuse.reuse_class import Transition
from sgl_importance.reuse.turns import Turn
from sgl_importance.tiers import Tier

_COMPACT_SLACK = 64


class Answer(NamedTuple):
    """The end of a request.

    Attributes:
        serial: of the request, as ``ShadowRanking.admitted`` returned it.
        prompt_tokens: length of its prompt.
        output_tokens: that were generated.
        end: how.
    """

    serial: int
    prompt_tokens: int
    output_tokens: int
    end: AnswerEnd


class Awaited(NamedTuple):
    """An answer whose end may be told later.

    Attributes:
        clock: admitted requests when it ended.
        turn: that it became.
    """

    clock: int
    turn: Turn | None


class ShadowRanking(ABC):
    """Eviction order of each tier of a shadow cache, kept up by the events of its nodes."""

    def admitted(self, hits: Sequence[ShadowNode], session: SessionName | None = None) -> int:
        """A request of a session was admitted and found these nodes, root side first; returns its serial
        number."""
        return 0

    def gone(self, serial: int) -> None:  # noqa: B027 -- recency needs little
        """A request will not be answered."""

    def session_over(self, name: SessionName) -> None:  # noqa: B027 -- recency needs little
        """A session said that it is over."""

    def touched(self, node: ShadowNode) -> None:  # noqa: B027 -- recency needs little
        """A request walked over the node."""

    def created(self, node: ShadowNode, serial: int) -> None:  # noqa: B027 -- recency needs little
        """A request brought the node."""

    def split(self, upper: ShadowNode, lower: ShadowNode) -> None:  # noqa: B027 -- recency needs little
        """``lower`` was cut: its first pages are ``upper`` now."""

    def ended(self, path: Sequence[ShadowNode], prompt_pages: int, serial: int, *, is_finished: bool) -> None:  # noqa: B027 -- recency needs little
        """The prefill or the answer of a request ended at the end of the path."""

    def answered(self, path: Sequence[ShadowNode], answer: Answer) -> Awaited | None:
        """The answer at the end of the path ended.

        Returns:
            What ``told`` needs; None where nothing is left to be told.
        """
        return None

    def told(self, path: Sequence[ShadowNode], awaited: Awaited, answer_end: AnswerEnd) -> None:  # noqa: B027 -- recency needs little
        """It became known how the answer at the end of the path had ended.

        Args:
            path: what is left of it in the tree.
            awaited: that ``answered`` returned then.
            answer_end: how.
        """

    def computed_again(self, node: ShadowNode, serial: int) -> None:  # noqa: B027 -- recency needs little
        """A request computed a node that only the host had."""

    def copies(self, node: ShadowNode) -> bool:
        """Whether the host takes a copy of the node when it is offered one."""
        return True

    @abstractmethod
    def enter(self, node: ShadowNode, tier: Tier = Tier.DEVICE, below: Tier | None = None) -> None:
        """The node became evictable from a tier, or its facts changed while it was.

        Args:
            below: tier that keeps a copy; None where the KV would be lost.
        """

    @abstractmethod
    def leave(self, node: ShadowNode, tier: Tier = Tier.DEVICE) -> None:
        """The node is not evictable from the tier any more."""

    @abstractmethod
    def victim(self, tier: Tier = Tier.DEVICE) -> ShadowNode | None:
        """Takes the node that goes next out of the tier's order; None where nothing is evictable."""

    def gives_tail(self, node: ShadowNode) -> bool:
        """Whether a victim may go in parts; stock's go whole."""
        return False

    def tail_cut(self, front: ShadowNode, tail: ShadowNode) -> None:  # noqa: B027 -- recency goes whole
        """``tail`` was split off ``front`` to be evicted."""

    def removed(self, node: ShadowNode) -> None:  # noqa: B027 -- recency needs little
        """The node left its last tier; its parent is still linked."""


class LruShadowRanking(ShadowRanking):
    """Stock's order: the leaf whose last walk is the longest ago."""

    def __init__(self) -> None:
        self._time = 0
        self._orders = {tier: _Recency() for tier in (Tier.DEVICE, Tier.HOST)}

    def touched(self, node: ShadowNode) -> None:
        self._time += 1
        node.last_use = self._time

    def created(self, node: ShadowNode, serial: int) -> None:
        self.touched(node)

    def split(self, upper: ShadowNode, lower: ShadowNode) -> None:
        # As upstream does: a split counts as a use of both parts.
        self.touched(upper)
        self.touched(lower)

    def enter(self, node: ShadowNode, tier: Tier = Tier.DEVICE, below: Tier | None = None) -> None:
        self._orders[tier].add(node)

    def leave(self, node: ShadowNode, tier: Tier = Tier.DEVICE) -> None:
        self._orders[tier].discard(node)

    def victim(self, tier: Tier = Tier.DEVICE) -> ShadowNode | None:
        return self._orders[tier].pop()


class _Recency:
    """The evictable nodes of one tier, by their last use."""

    def __init__(self) -> None:
        self._evictable: dict[int, ShadowNode] = {}
        self._heap: list[tuple[int, int]] = []  # (last use, node id), stale where these have changed

    def add(self, node: ShadowNode) -> None:
        self._evictable[node.id] = node
        heappush(self._heap, (node.last_use, node.id))
        if len(self._heap) > 2 * len(self._evictable) + _COMPACT_SLACK:
            self._heap = [(each.last_use, each.id) for each in self._evictable.values()]
            heapify(self._heap)

    def discard(self, node: ShadowNode) -> None:
        self._evictable.pop(node.id, None)

    def pop(self) -> ShadowNode | None:
        while self._heap:
            last_use, node_id = heappop(self._heap)
            node = self._evictable.get(node_id)
            if node is not None and node.last_use == last_use:
                del self._evictable[node_id]
                return node
        return None


class ImportanceRanking(ShadowRanking):
    """The server's own policy object, with g fixed at 1: a shadow cache sees no attention.

    Args:
        cost: of the server's policy.
        page_size: tokens per page.
        ghost_pages: pages to remember after their eviction.
    """

    def __init__(self, cost: CostModel, page_size: int, ghost_pages: int) -> None:
        self._page_size = page_size
        self.policy = ImportancePolicy(cost, use_importance=False)
        self._tracker = ReuseTracker(self.policy.reuse, page_size=page_size, ghost_pages=ghost_pages)
        self._turns = TurnTracker(self.policy.turns, page_size=page_size, on_change=self.policy.turn_changed)
        self._sessions = ShadowSessions(self._tracker, self._turns)
        self._evictable: dict[Tier, dict[int, tuple[ShadowNode, Tier | None]]] = {
            Tier.DEVICE: {},
            Tier.HOST: {},
        }
        self._transitions: dict[int, Transition] = {}

    @staticmethod
    def _known(node: ShadowNode) -> NodeMetadata:
        assert node.metadata is not None
        return node.metadata

    def admitted(self, hits: Sequence[ShadowNode], session: SessionName | None = None) -> int:
        transition = transition_after(self._known(hits[-1]) if hits else None)
        serial = self.policy.admit()
        self._transitions[serial] = transition
        for node in hits:
            self._tracker.accessed(self._known(node), transition)
        self._sessions.admitted(serial, session, hits)
        return serial

    def created(self, node: ShadowNode, serial: int) -> None:
        assert node.parent is not None
        parent = None if node.parent.is_root else self._known(node.parent)
        node.metadata = NodeMetadata(
            tokens=len(node.pages) * self._page_size,
            depth=node.start * self._page_size,
            page_size=self._page_size,
            clock=self.policy.clock,
        )
        node.metadata.importance.creator = serial
        transition = self._transitions[serial]
        returned = self._tracker.created(node.metadata, transition, parent=parent, pages=node.pages)
        self._sessions.created(node, serial, [ghost for ghost, _ in returned])

    def split(self, upper: ShadowNode, lower: ShadowNode) -> None:
        upper.metadata = self._tracker.split(self._known(lower), len(upper.pages) * self._page_size)
        self._sessions.split(upper)

    def ended(self, path: Sequence[ShadowNode], prompt_pages: int, serial: int, *, is_finished: bool) -> None:
        if is_finished:
            self._transitions.pop(serial, None)
        self._sessions.cached(serial, path)
        self._tracker.ended(
            [self._known(node) for node in path],
            serial=serial,
            prompt_tokens=prompt_pages * self._page_size,
            is_finished=is_finished,
        )

    def answered(self, path: Sequence[ShadowNode], answer: Answer) -> Awaited | None:
        nodes = [self._known(node) for node in path]
        self._tracker.answered(nodes, answer.end)
        turn = self._turns.finished(
            nodes,
            serial=answer.serial,
            clock=self.policy.clock,
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            answer_end=answer.end,
        )
        self._rank_again(self._sessions.answered(path, answer.serial, turn))
        return Awaited(self.policy.clock, turn) if answer.end is AnswerEnd.UNKNOWN else None

    def gone(self, serial: int) -> None:
        self._transitions.pop(serial, None)
        self._sessions.gone(serial)

    def session_over(self, name: SessionName) -> None:
        self._rank_again(self._sessions.over(name))

    def told(self, path: Sequence[ShadowNode], awaited: Awaited, answer_end: AnswerEnd) -> None:
        untouched = [node for node in path if self._known(node).last_access <= awaited.clock]
        self._tracker.answered([self._known(node) for node in untouched], answer_end)
        self._turns.told(awaited.turn, answer_end)
        self._rank_again(untouched)

    def _rank_again(self, nodes: Iterable[ShadowNode]) -> None:
        """The facts of these nodes changed."""
        for node in nodes:
            for tier, evictable in self._evictable.items():
                if node.id in evictable:
                    self.enter(node, tier, evictable[node.id][1])

    def computed_again(self, node: ShadowNode, serial: int) -> None:
        self._tracker.accessed(self._known(node), self._transitions[serial])

    def copies(self, node: ShadowNode) -> bool:
        return not self._known(node).expendable

    def enter(self, node: ShadowNode, tier: Tier = Tier.DEVICE, below: Tier | None = None) -> None:
        self._evictable[tier][node.id] = node, below
        self.policy.enter(tier, node.id, self._known(node), below=below)

    def leave(self, node: ShadowNode, tier: Tier = Tier.DEVICE) -> None:
        if self._evictable[tier].pop(node.id, None) is not None:
            self.policy.leave(tier, node.id)

    def victim(self, tier: Tier = Tier.DEVICE) -> ShadowNode | None:
        node_id = self.policy.victim(tier)
        return None if node_id is None else self._evictable[tier].pop(node_id)[0]

    def gives_tail(self, node: ShadowNode) -> bool:
        return not self._known(node).expendable

    def tail_cut(self, front: ShadowNode, tail: ShadowNode) -> None:
        self._tracker.tail_cut(self._known(front), self._known(tail))

    def removed(self, node: ShadowNode) -> None:
        self._sessions.removed(node)
        self._tracker.removed(self._known(node), node.pages)

"""What sessions that are over give back in the shadow of importance, as in the server's own tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sgl_importance.nodes.ghosts import GhostNode
from sgl_importance.nodes.named_sessions import Session, SessionName, SessionTable, owner, owner_of_ghosts
from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.nodes.reuse_tracker import ReuseTracker
from sgl_importance.nodes.turn_tracker import TurnTracker
from sgl_importance.observe.shadow.shadow_node import ShadowNode
from sgl_importance.reuse.turns import Turn


class ShadowSessions:
    """Which nodes of a shadow a session alone has asked for.

    A call that frees them at once is one that gives them back first here: nobody else's hits depend on it.

    Args:
        tracker: of the shadow.
        turns: of the shadow.
    """

    def __init__(self, tracker: ReuseTracker, turns: TurnTracker) -> None:
        self._tracker = tracker
        self._turns = turns
        self._table = SessionTable()
        self._running: dict[int, Session] = {}  # by serial of the request
        self._nodes: dict[int, ShadowNode] = {}

    def admitted(self, serial: int, name: SessionName | None, hits: Sequence[ShadowNode]) -> None:
        """A request of the session, or of none, found these nodes."""
        if name is not None:
            self._running[serial] = self._table.open(name)
        self._visited(serial, hits)

    def cached(self, serial: int, path: Sequence[ShadowNode]) -> None:
        """The request's tokens are in the shadow; it may have computed what was given back."""
        for node in path:
            if _known(node).importance.creator != serial:
                _known(node).expendable = False
        self._visited(serial, path)

    def _visited(self, serial: int, path: Iterable[ShadowNode]) -> None:
        """The request has these nodes in common with whoever asked for them before."""
        session = self._running.get(serial)
        for node in path:
            metadata = _known(node)
            metadata.session = owner(metadata.session, session)

    def created(self, node: ShadowNode, serial: int, ghosts: Sequence[GhostNode]) -> None:
        """The request brought the node, in which these ghosts came back."""
        self._nodes[node.id] = node
        _known(node).session = owner_of_ghosts(ghosts, self._running.get(serial))

    def split(self, upper: ShadowNode) -> None:
        """A node was cut; the first part is new."""
        self._nodes[upper.id] = upper

    def answered(self, path: Sequence[ShadowNode], serial: int, turn: Turn | None) -> list[ShadowNode]:
        """The request was answered; its tokens are the path.

        Returns:
            Nodes to rank again: those of a session that was closed while the request ran.
        """
        session = self._running.pop(serial, None)
        if session is None:
            return []
        if turn is not None:
            session.took(turn)
        own = [node for node in path if _known(node).session is session]
        for node in own:
            session.ends.pop(node.id, None)
        if own:
            session.ends_at(own[-1].id)
        return self._give_back(session) if session.is_closed else []

    def gone(self, serial: int) -> None:
        """The request will not be answered."""
        self._running.pop(serial, None)

    def over(self, name: SessionName) -> list[ShadowNode]:
        """The session said that it is over; its nodes, to be ranked again."""
        session = self._table.close(name)
        return [] if session is None else self._give_back(session)

    def removed(self, node: ShadowNode) -> None:
        """The node leaves; its parent is still linked."""
        del self._nodes[node.id]
        if (session := _known(node).session) is not None:
            above = node.parent
            assert above is not None
            is_own = not above.is_root and _known(above).session is session
            session.left(node.id, above.id if is_own else None)

    def _give_back(self, session: Session) -> list[ShadowNode]:
        # Of a node that others asked for, too, a session does not hear that it left.
        ends = [self._nodes[end] for end in session.ends if end in self._nodes]
        path = {node.id: node for end in ends for node in end.path()}
        changed = [node for node in path.values() if _is_turn_of(session, node)]
        for node in changed:
            _known(node).turn = None  # what becomes of this session says nothing of the others
        for turn in session.turns:
            self._turns.over(turn)
        session.turns = []
        own = [node for node in path.values() if _known(node).session is session]
        own.sort(key=lambda node: node.start, reverse=True)
        for node in own:
            self._tracker.over(_known(node))
        return changed + own


def _is_turn_of(session: Session, node: ShadowNode) -> bool:
    """Whether others asked for the node too, and the last turn through it was the session's."""
    return _known(node).session is not session and _known(node).turn in session.turns


def _known(node: ShadowNode) -> NodeMetadata:
    assert node.metadata is not None
    return node.metadata

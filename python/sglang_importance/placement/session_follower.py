"""Follows sessions from their first request to the word that they are over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sgl_importance.nodes.named_sessions import Session, SessionName, SessionTable, owner
from sgl_importance.reuse.turns import Turn
from sglang_importance.placement.pinning import Pinning
from sglang_importance.tree.state import TreeState
from sglang_importance.upstream.request_record import record_of, session_name_of


class SessionFollower:
    """Knows which nodes a session alone has asked for, and gives them back when it is over.

    What is given back is evicted first and copied nowhere, as what ``drop_after_use`` marks; a pin of the
    operator still keeps it. Under ``observe`` nothing moves: only the turns are told.

    Args:
        state: of the tree.
        pins: those that only the session's requests asked for end with it.
        refresh: ranks a node again.
    """

    def __init__(self, state: TreeState, pins: Pinning, refresh: Callable[[UnifiedTreeNode], None]) -> None:
        self._state = state
        self._tree = state.tree
        self._pins = pins
        self._refresh = refresh
        self._table = SessionTable()
        self.is_opened: Callable[[str], bool] = lambda session_id: False
        """Whether sglang keeps a session of this id itself."""
        self.on_over: Callable[[SessionName], None] = lambda name: None
        """Called with each session that says it is over, known or not."""

    def reset(self) -> None:
        """The tree was emptied."""
        self._table.clear()

    def admitted(self, req: Req, hits: Sequence[UnifiedTreeNode]) -> None:
        """A request was admitted, and found these nodes."""
        if (name := session_name_of(req)) is not None:
            record_of(req).session = self._table.open(name)
        self.visited(req, hits)

    def visited(self, req: Req, path: Sequence[UnifiedTreeNode]) -> None:
        """The request has these nodes in common with whoever asked for them before."""
        session = record_of(req).session
        for node in path:
            metadata = self._tree.metadata(node)
            metadata.session = owner(metadata.session, session)

    def answered(self, req: Req, path: Sequence[UnifiedTreeNode], turn: Turn | None) -> None:
        """The request has ended, its tokens are in the tree.

        Args:
            path: its nodes, root side first.
            turn: of its answer; None where turns are not followed.
        """
        record = record_of(req)
        session = record.session
        if session is None:
            return
        if turn is not None:
            session.took(turn)
        own = [node for node in path if self._tree.metadata(node).session is session]
        for node in own:
            session.ends.pop(node.id, None)
        if own:
            session.ends_at(own[-1].id)
        name = session_name_of(req)
        if name is not None and record.hints is not None and record.hints.session_over:
            self.close(name)
        elif session.is_closed:  # while the request ran
            self._give_back(session)

    def close(self, name: SessionName) -> list[UnifiedTreeNode] | None:
        """A session said that it is over.

        Returns:
            Nodes that are given back, those behind before those in front; None where no session of this name
            is open.
        """
        self.on_over(name)
        session = self._table.close(name)
        if session is None:
            return None
        self._state.counters.sessions_closed += 1
        return self._give_back(session)

    def _give_back(self, session: Session) -> list[UnifiedTreeNode]:
        path = {node.id: node for end in session.ends for node in self._tree.path_to(end)}
        for node in path.values():
            metadata = self._tree.metadata(node)
            if metadata.session is not session and metadata.turn in session.turns:
                metadata.turn = None  # what becomes of this session says nothing of the others
                self._refresh(node)
        for turn in session.turns:
            self._tree.turns.over(turn)
        session.turns = []
        if self._state.options.policy != "importance":
            return []
        self._pins.session_over(session)
        own = [node for node in path.values() if self._tree.metadata(node).session is session]
        own.sort(key=lambda node: self._tree.metadata(node).depth, reverse=True)
        for node in own:
            metadata = self._tree.metadata(node)
            if not metadata.expendable:
                self._state.counters.sessions_given_back_tokens += metadata.tokens
            self._tree.tracker.over(metadata)
            self._refresh(node)
        return own

"""Sessions, as requests name them: which nodes one alone has asked for, until it says that it is over."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from sgl_importance.reuse.turns import Turn

MAX_SESSIONS = 16_384
"""Sessions known at a time; of the one that was silent longest nothing can be given back any more."""
MAX_ENDS = 64
"""Branches of a session whose ends are known."""


class SessionName(NamedTuple):
    """A session, as its requests name it: the same id in another namespace is another session.

    Attributes:
        session_id: that the client chose.
        extra_key: namespace of its requests, an adapter's name included.
        cache_salt: namespace of its requests, beside the key.
    """

    session_id: str
    extra_key: str | None = None
    cache_salt: str | None = None


@dataclass(slots=True, eq=False)
class Session:
    """One session, from its first request until it is closed or forgotten.

    Attributes:
        is_closed: whether it has said that it is over.
        ends: ids of the nodes where texts of its own end, oldest first.
        turns: of its requests, those from which nothing has gone on yet.
    """

    is_closed: bool = False
    ends: dict[int, None] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)

    def ends_at(self, node_id: int) -> None:
        """A text of the session's own ends at a node; the oldest end beyond ``MAX_ENDS`` is forgotten."""
        self.ends[node_id] = self.ends.pop(node_id, None)
        if len(self.ends) > MAX_ENDS:
            del self.ends[next(iter(self.ends))]

    def left(self, node_id: int, parent_id: int | None) -> None:
        """A node left the tree; ``parent_id``: of the node above it, where that is the session's own, too."""
        if node_id not in self.ends:
            return
        del self.ends[node_id]
        if parent_id is not None:
            self.ends_at(parent_id)

    def took(self, turn: Turn) -> None:
        """A request of the session was answered."""
        self.turns = [*(each for each in self.turns if each.is_open), turn][-MAX_ENDS:]


def owner(known: Session | None, visitor: Session | None) -> Session | None:
    """Whose alone a node is that only ``known`` had asked for, once ``visitor`` asks for it, too.

    Args:
        known: None where several sessions had, or requests without one.
        visitor: None of a request without a session.
    """
    if known is not None and known.is_closed:
        return visitor
    return known if known is visitor else None


class _Returned(Protocol):
    session: Session | None


def owner_of_ghosts(ghosts: Iterable[_Returned], visitor: Session | None) -> Session | None:
    """Whose alone a node is that ``visitor`` brings, and in which these ghosts come back."""
    for ghost in ghosts:
        visitor = owner(ghost.session, visitor)
    return visitor


class SessionTable:
    """The sessions that are open, by name; beyond ``MAX_SESSIONS`` the one silent longest is forgotten."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[SessionName, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, name: SessionName) -> Session:
        """The session of a request, which opens it where it is not open."""
        session = self._sessions.setdefault(name, Session())
        self._sessions.move_to_end(name)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def close(self, name: SessionName) -> Session | None:
        """Closes a session; None where none of this name is open."""
        session = self._sessions.pop(name, None)
        if session is not None:
            session.is_closed = True
        return session

    def clear(self) -> None:
        """Forgets all sessions: the tree was emptied."""
        self._sessions.clear()

"""Accounts for every prompt that was not found, from the cache's own events."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sgl_importance.background.batch_worker import BatchWorker
from sgl_importance.metrics_table import FaultPlace
from sgl_importance.misses.account import AccountedRequest, account_of
from sgl_importance.misses.path_memory import Namespace, PathMemory
from sgl_importance.misses.path_tree import PathNode, packed
from sgl_importance.misses.reason import Cause, Fate, PathVisit, Reason, Room
from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.tiers import Tier
from sglang_importance.cache.room import RoomNeed
from sglang_importance.tree.state import TreeState
from sglang_importance.upstream.nodes import key_of
from sglang_importance.upstream.request_record import RequestRecord, found_tokens, namespace_of, record_of

RECENT_REQUESTS = 200
MAX_PAGES = 2**18
"""Pages to remember at most, also where a page is one token: then about 100 MB of scheduler memory."""
MAX_MARKS = 2**16
MOST_NOTED = 4096
"""Events that wait for the thread, at most: then the scheduler follows them itself."""
IDLE_SECONDS = 0.05
"""Between two looks of the thread."""


class _NotedEvent(NamedTuple):
    """Something to follow, later and elsewhere: all that it needs is here, or does not change any more."""

    follow: Callable[..., None]
    facts: tuple[Any, ...]


def _noted(facts_of: Callable[..., tuple[Any, ...]]) -> Callable[..., None]:
    """A method that gives what is to follow an event, and the facts for it: it notes them."""

    @wraps(facts_of)
    def note(misses: Misses, *args: Any) -> None:
        if misses.memory is not None:
            try:
                misses._note(*facts_of(misses, *args))
            except Exception as error:
                misses._fail(error)

    return note


class Misses:
    """Follows the nodes of a tree in a memory of paths, and accounts for each admitted request.

    The scheduler's thread only notes what happened. ``work_in_background`` leaves the rest to a thread;
    without it, it is done at once. What fails here ends the accounts, and nothing else.

    Args:
        state: of the tree; its counters count.
        pages: to remember that the cache does not hold.
        ahead: 1 where the tree looks each token up with the one behind it.

    Attributes:
        need: for whom room is being made, and why the cache is emptied.
        recent: the last requests, the newest last. As ``memory``, up to date after ``settle``.
    """

    def __init__(self, state: TreeState, *, pages: int, ahead: int = 0) -> None:
        self.need = RoomNeed()
        self.recent: deque[AccountedRequest] = deque(maxlen=RECENT_REQUESTS)
        self.memory: PathMemory | None = PathMemory(
            state.tree.page_size, gone_pages=pages, max_marks=MAX_MARKS, ahead=ahead
        )
        self._state = state
        self._ends: dict[int, PathNode] = {}  # by id of the node of the tree that ends there
        self._worker: BatchWorker[None] | None = None
        self._noted: deque[_NotedEvent] = deque()
        self._lock = threading.Lock()
        self.on_counted: Callable[[], None] = lambda: None
        """Called behind changes of the counters, on any thread, one call at a time."""

    @classmethod
    def create(cls, state: TreeState, *, device_pages: int, ahead: int = 0) -> Misses | None:
        """None where no account is kept: the operator's choice, and of ranks that follow another."""
        pages = min(int(state.options.misses.memory * device_pages), MAX_PAGES)
        return cls(state, pages=pages, ahead=ahead) if pages and state.ranks.leads else None

    def work_in_background(self) -> None:
        """From now on a thread follows what is noted, in its order."""
        # It looks by itself: to wake a thread for each request takes longer than to note all that it does.
        self._worker = BatchWorker(
            "importance-misses",
            lambda nothing, refused: self._follow_noted(),
            max_bytes=0,
            last_words="The accounts of misses end here; the server goes on",
            idle_seconds=IDLE_SECONDS,
        )
        self._worker.start()

    def close(self) -> None:
        """Nothing is known any more."""
        self.memory = None
        self._noted.clear()
        self._ends.clear()
        self.recent.clear()

    def settle(self) -> None:
        """Follows what is noted and not followed yet."""
        self._follow_noted()

    # ---- requests ----

    @_noted
    def admitted(self, req: Req) -> tuple[Any, ...]:
        """A request was admitted, and is about to enter the tree."""
        visit = self.now(req.rid)
        return (
            self._account,
            record_of(req),
            namespace_of(req),
            req.origin_input_ids,
            found_tokens(req),
            visit,
        )

    def _account(
        self,
        memory: PathMemory,
        record: RequestRecord,
        namespace: Namespace,
        tokens: Sequence[int],
        found: Mapping[Tier, int],
        visit: PathVisit,
    ) -> None:
        prompt = packed(tokens, memory.ahead)
        path = memory.path(namespace, prompt)
        account = account_of(memory, namespace, prompt, path, found)
        memory.asked(namespace, prompt, path, visit)
        record.misses = AccountedRequest(visit, namespace, account)
        self.recent.append(record.misses)
        missed = self._state.counters.missed_tokens
        for part in account.parts:
            missed[part.reason] += part.tokens

    @_noted
    def given_up(self, req: Req, cause: Cause) -> tuple[Any, ...]:
        """A request has left the tree; what it had computed and the tree does not hold is lost."""
        assert self.memory is not None
        tokens = (req.origin_input_ids + req.output_ids)[: req.owned_kv_len() + self.memory.ahead]
        return self._given_up, namespace_of(req), tokens, cause, self.now(req.rid)

    def _given_up(
        self, memory: PathMemory, namespace: Namespace, tokens: Sequence[int], cause: Cause, visit: PathVisit
    ) -> None:
        fate = Fate(Reason.NOT_KEPT, visit.clock, visit.time, cause)
        memory.not_kept(namespace, packed(tokens, memory.ahead), fate, visit)

    def now(self, rid: str | None) -> PathVisit:
        """A visit of a request at this moment."""
        return PathVisit(rid, self._state.policy.clock, time.time())

    # ---- nodes ----

    @_noted
    def taken_in(self, node: UnifiedTreeNode, rid: str | None) -> tuple[Any, ...]:
        """A node came into the tree, brought by a request where that is known."""
        assert node.parent is not None
        above = node.parent.id if node.parent.parent is not None else None
        return self._taken_in, node.id, above, key_of(node), self.now(rid)

    def _taken_in(
        self, memory: PathMemory, node_id: int, above: int | None, key: RadixKey, visit: PathVisit
    ) -> None:
        namespace = key.extra_key or None, key.cache_salt or None
        end = None if above is None else self._ends[above]
        self._ends[node_id] = memory.holds(end, namespace, packed(key.raw_token_ids(), memory.ahead), visit)

    @_noted
    def split(self, new_parent: UnifiedTreeNode, child: UnifiedTreeNode) -> tuple[Any, ...]:
        """``child`` was cut: its first tokens are ``new_parent`` now."""
        return self._split, new_parent.id, child.id, len(key_of(child))

    def _split(self, memory: PathMemory, new_parent: int, child: int, tokens: int) -> None:
        self._ends[new_parent] = memory.cut(self._ends[child], tokens)

    @_noted
    def removed(self, node: UnifiedTreeNode, metadata: NodeMetadata) -> tuple[Any, ...]:
        """A node leaves the tree."""
        policy = self._state.policy
        is_given_back = metadata.is_given_back  # its session may be closed later
        reuse = policy.reuse_rate(metadata.evicted_from, metadata)  # and its turn may go on
        now = policy.clock, time.time()
        return self._removed, node.id, metadata, is_given_back, reuse, self.need.room(), now

    def _removed(
        self,
        memory: PathMemory,
        node_id: int,
        metadata: NodeMetadata,
        is_given_back: bool,
        reuse: float,
        room: Room,
        now: tuple[int, float],
    ) -> None:
        clock, seconds = now
        reason, tier = Reason.EVICTED, metadata.evicted_from
        if is_given_back:
            reason = Reason.SESSION_OVER
            tier = Tier.STORAGE if metadata.in_storage else tier
        elif metadata.in_storage:
            reason = Reason.STORAGE
        fate = Fate(reason=reason, clock=clock, time=seconds, tier=tier, room=room, reuse=reuse)
        memory.gone(self._ends.pop(node_id), metadata.tokens, fate)

    @_noted
    def reset(self) -> tuple[Any, ...]:
        """The tree was emptied at once."""
        fate = Fate(Reason.FLUSHED, self._state.policy.clock, time.time(), self.need.flush_cause)
        return self._reset, fate

    def _reset(self, memory: PathMemory, fate: Fate) -> None:
        self._ends.clear()
        memory.flushed(fate)

    # ---- how ----

    def _note(self, follow: Callable[..., None], *facts: Any) -> None:
        self._noted.append(_NotedEvent(follow, facts))
        if self._worker is None or len(self._noted) >= MOST_NOTED:
            self.settle()

    def _follow_noted(self) -> None:
        with self._lock:
            while self._noted:
                self._follow(self._noted.popleft())
            self.on_counted()

    def _follow(self, event: _NotedEvent) -> None:
        if (memory := self.memory) is None:
            return
        try:
            event.follow(memory, *event.facts)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._state.faults.note(FaultPlace.MISSES, error)
        self.close()

    # ---- checks ----

    def check_integrity(self, nodes: Iterator[UnifiedTreeNode]) -> None:
        """Asserts that the memory holds what the tree holds, and nothing else."""
        self.settle()
        if self.memory is None:
            return
        self.memory.check_integrity()
        held = {node.id: len(key_of(node)) for node in nodes if self._state.tree.known(node) is not None}
        assert self._ends.keys() == held.keys(), self._ends.keys() ^ held.keys()
        assert self.memory.held_pages() * self.memory.page_size == sum(held.values())

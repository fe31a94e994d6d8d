"""Accounts for every prompt that was not found, from the cache's own events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from sgl_importance.metrics_table import FaultPlace
from sgl_importance.misses.account import AccountedRequest, account_of
from sgl_importance.misses.path_memory import PathMemory
from sgl_importance.misses.path_tree import PathNode, packed
from sgl_importance.misses.reason import Cause, Fate, PathVisit, Reason
from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.tiers import Tier
from sglang_importance.cache.room import RoomNeed
from sglang_importance.tree.state import TreeState
from sglang_importance.upstream.nodes import key_of, tokens_of
from sglang_importance.upstream.request_record import namespace_of, record_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

RECENT_REQUESTS = 200
MAX_PAGES = 2**18
"""Pages to remember at most, also where a page is one token: then about 100 MB of scheduler memory."""
MAX_MARKS = 2**16


class Misses:
    """Follows the nodes of a tree in a memory of paths, and accounts for each admitted request.

    What fails here ends the accounts, and nothing else.

    Args:
        state: of the tree; its counters count.
        pages: to remember that the cache does not hold.

    Attributes:
        need: for whom room is being made, and why the cache is emptied.
        recent: the last requests, the newest last.
    """

    def __init__(self, state: TreeState, *, pages: int) -> None:
        self.need = RoomNeed()
        self.recent: deque[AccountedRequest] = deque(maxlen=RECENT_REQUESTS)
        self.memory: PathMemory | None = PathMemory(
            state.tree.page_size, gone_pages=pages, max_marks=MAX_MARKS
        )
        self._state = state
        self._ends: dict[int, PathNode] = {}  # by id of the node of the tree that ends there

    @classmethod
    def create(cls, state: TreeState, *, device_pages: int) -> Misses | None:
        """None where no account is kept: the operator's choice, and of ranks that follow another."""
        pages = min(int(state.options.misses.memory * device_pages), MAX_PAGES)
        return cls(state, pages=pages) if pages and state.ranks.leads else None

    def close(self) -> None:
        """Nothing is known any more."""
        self.memory = None
        self._ends.clear()
        self.recent.clear()

    # ---- requests ----

    def admitted(self, req: Req) -> None:
        """A request was admitted, and is about to enter the tree."""
        if self.memory is not None:
            self._follow(self._account, self.memory, req)

    def _account(self, memory: PathMemory, req: Req) -> None:
        namespace, prompt = namespace_of(req), packed(req.origin_input_ids)
        found = {
            Tier.DEVICE: req.cached_tokens_device,
            Tier.HOST: req.cached_tokens_host,
            Tier.STORAGE: req.cached_tokens_storage,
        }
        path = memory.path(namespace, prompt)
        account = account_of(memory, namespace, prompt, path, found)
        visit = self.now(req.rid)
        memory.asked(namespace, prompt, path, visit)
        accounted = record_of(req).misses = AccountedRequest(visit, namespace, account)
        self.recent.append(accounted)
        missed = self._state.counters.missed_tokens
        for part in account.parts:
            missed[part.reason] += part.tokens

    def given_up(self, req: Req, cause: Cause) -> None:
        """A request has left the tree; what it had computed and the tree does not hold is lost."""
        if self.memory is not None:
            self._follow(self._given_up, self.memory, req, cause)

    def _given_up(self, memory: PathMemory, req: Req, cause: Cause) -> None:
        tokens = packed((req.origin_input_ids + req.output_ids)[: req.owned_kv_len()])
        visit = self.now(req.rid)
        fate = Fate(Reason.NOT_KEPT, visit.clock, visit.time, cause)
        memory.not_kept(namespace_of(req), tokens, fate, visit)

    def now(self, rid: str | None) -> PathVisit:
        """A visit of a request at this moment."""
        return PathVisit(rid, self._state.policy.clock, time.time())

    # ---- nodes ----

    def taken_in(self, node: UnifiedTreeNode, rid: str | None) -> None:
        """A node came into the tree, brought by a request where that is known."""
        if self.memory is not None:
            self._follow(self._taken_in, self.memory, node, rid)

    def _taken_in(self, memory: PathMemory, node: UnifiedTreeNode, rid: str | None) -> None:
        assert node.parent is not None
        above = self._ends[node.parent.id] if node.parent.parent is not None else None
        key = key_of(node)
        namespace = key.extra_key or None, key.cache_salt or None
        self._ends[node.id] = memory.holds(above, namespace, packed(tokens_of(node)), self.now(rid))

    def split(self, new_parent: UnifiedTreeNode, child: UnifiedTreeNode) -> None:
        """``child`` was cut: its first tokens are ``new_parent`` now."""
        if self.memory is not None:
            self._follow(self._split, self.memory, new_parent, child)

    def _split(self, memory: PathMemory, new_parent: UnifiedTreeNode, child: UnifiedTreeNode) -> None:
        self._ends[new_parent.id] = memory.cut(self._ends[child.id], len(key_of(child)))

    def removed(self, node: UnifiedTreeNode, metadata: NodeMetadata) -> None:
        """A node leaves the tree."""
        if self.memory is not None:
            self._follow(self._removed, self.memory, node, metadata)

    def _removed(self, memory: PathMemory, node: UnifiedTreeNode, metadata: NodeMetadata) -> None:
        policy = self._state.policy
        reason, tier = Reason.EVICTED, metadata.evicted_from
        if metadata.is_given_back:
            reason = Reason.SESSION_OVER
            tier = Tier.STORAGE if metadata.in_storage else tier
        elif metadata.in_storage:
            reason = Reason.STORAGE
        fate = Fate(
            reason=reason,
            clock=policy.clock,
            time=time.time(),
            tier=tier,
            room=self.need.room(),
            reuse=policy.reuse.index(metadata.reuse_class, policy.clock - metadata.last_access),
        )
        memory.gone(self._ends.pop(node.id), metadata.tokens, fate)

    def reset(self) -> None:
        """The tree was emptied at once."""
        if self.memory is not None:
            self._follow(self._reset, self.memory)

    def _reset(self, memory: PathMemory) -> None:
        fate = Fate(Reason.FLUSHED, self._state.policy.clock, time.time(), self.need.flush_cause)
        self._ends.clear()
        memory.flushed(fate)

    def _follow(self, work: Callable[..., None], *args: object) -> None:
        try:
            work(*args)
        except Exception as error:
            self._state.faults.note(FaultPlace.MISSES, error)
            self.close()

    # ---- checks ----

    def check_integrity(self, nodes: Iterator[UnifiedTreeNode]) -> None:
        """Asserts that the memory holds what the tree holds, and nothing else."""
        if self.memory is None:
            return
        self.memory.check_integrity()
        held = {node.id: len(key_of(node)) for node in nodes if self._state.tree.known(node) is not None}
        assert self._ends.keys() == held.keys(), self._ends.keys() ^ held.keys()
        assert self.memory.held_pages() * self.memory.page_size == sum(held.values())

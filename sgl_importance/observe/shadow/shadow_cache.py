"""A prefix cache without KV, which computes the hits that a server with its policy would have.

It allocates, locks, splits and evicts as the server's radix cache does on its device tier: a node per
prefill chunk, only leaves, whole ones or their tails, never nodes of a running request. A prompt that the
pool cannot hold is refused. Where running requests alone fill the pool, a server retracts; a shadow lets it
overflow until they end. Chunks are those of a request that is prefilled alone: beside others a server's are
shorter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from sgl_importance.nodes.named_sessions import SessionName
from sgl_importance.nodes.tail_size import tail_pages
from sgl_importance.observe.shadow.shadow_node import ShadowNode
from sgl_importance.observe.shadow.shadow_ranking import Answer, Awaited, ShadowRanking
from sgl_importance.reuse.answer_end import MAX_AWAITED, AnswerEnd

MAX_RUNNING = 1 << 14  # beyond it the oldest, whose ends were never reported, are dropped


@dataclass(slots=True)
class _Running:
    """A request between its admission and its end."""

    end: ShadowNode
    serial: int
    prompt_tokens: int
    pages: int  # held, the started one included
    private: int  # held, not in the tree


class ShadowCache:
    """One device tier.

    Args:
        capacity: pages of the pool.
        page_size: tokens per page.
        ranking: the eviction order.
        spare_pages: pages that must be free beyond what a request needs, for each running request: sglang
            frees one (``mem_cache/allocation.py``) before a prefill and before each decode step.
        chunk_tokens: of a prompt that are prefilled at once, and inserted as one node; None for all of it.

    Attributes:
        used: pages in the tree, on the device.
        evicted: pages that were given up so far.
    """

    def __init__(
        self,
        capacity: int,
        page_size: int,
        ranking: ShadowRanking,
        *,
        spare_pages: int = 0,
        chunk_tokens: int | None = None,
    ) -> None:
        assert capacity > 0
        assert chunk_tokens is None or chunk_tokens > 0
        self._spare_pages = spare_pages
        # sglang cuts a chunk to whole pages (`schedule_policy.py`, `add_one_req`).
        self._chunk_pages = capacity if chunk_tokens is None else max(chunk_tokens // page_size, 1)
        self.capacity = capacity
        self.ranking = ranking
        self.used = self.evicted = 0
        self._page_size = page_size
        self._private = 0
        self._serial = 0
        self._root = ShadowNode(0, None, [], 0)
        self._running: OrderedDict[str, _Running] = OrderedDict()
        self._awaited: OrderedDict[str, tuple[ShadowNode, Awaited]] = OrderedDict()

    # ---- requests ----

    def admit(
        self, request: str, pages: list[bytes], tokens: int, session: SessionName | None = None
    ) -> int | None:
        """A request starts.

        Args:
            request: its name until ``finish``.
            pages: chained digests of the prompt's whole pages.
            tokens: prompt length.
            session: that the request names.

        Returns:
            Prompt tokens found in the cache, never the last one; None where the prompt is longer than the
            pool: such a request is refused, and leaves no trace.
        """
        self.gone(request)
        total = -(-tokens // self._page_size)
        if total > self.capacity:
            return None
        node, matched = self._hold(*self._walk(pages[: max(tokens - 1, 0) // self._page_size]))
        end, done, serial = node, matched, None
        while serial is None or done < total:
            chunk = min(self._chunk_pages, total - done)
            self._make_room(chunk + self._spare_pages)
            if serial is None:
                serial = self.ranking.admitted(node.path(), session)
            done += chunk
            previous, end = end, self._insert(pages[:done], serial, is_chunk=done < total)
            self._lock(end)
            self._unlock(previous)
        self._private += total - len(pages)
        self.ranking.ended(end.path(), len(pages), serial, is_finished=False)
        self._running[request] = _Running(end, serial, tokens, total, total - len(pages))
        if len(self._running) > MAX_RUNNING:
            self.gone(next(iter(self._running)))
        return matched * self._page_size

    def finish(
        self, request: str, pages: list[bytes], tokens: int, answer_end: AnswerEnd = AnswerEnd.UNKNOWN
    ) -> None:
        """A request ended, and its answer goes into the cache.

        Args:
            request: as ``admit`` named it; an unknown one is ignored.
            pages: chained digests of the whole pages of prompt and answer.
            tokens: of prompt and answer.
            answer_end: how the answer ended.
        """
        running = self._running.pop(request, None)
        if running is None:
            return
        # The last decode step may have begun a page, and used up what was spare for this request.
        stepping = len(self._running) + (tokens % self._page_size != 1)
        grown = -(-tokens // self._page_size) - running.pages
        self._make_room(grown + self._spare_pages * stepping)
        end = self._insert(pages, running.serial)
        self._lock(end)
        self._release(running)
        prompt_pages = running.prompt_tokens // self._page_size
        self.ranking.ended(end.path(), prompt_pages, running.serial, is_finished=True)
        output_tokens = max(tokens - running.prompt_tokens, 0)
        answer = Answer(running.serial, running.prompt_tokens, output_tokens, answer_end)
        awaited = self.ranking.answered(end.path(), answer)
        self._unlock(end)
        if awaited is not None:
            self._awaited[request] = end, awaited
            if len(self._awaited) > MAX_AWAITED:
                self._awaited.popitem(last=False)

    def told(self, request: str, answer_end: AnswerEnd) -> None:
        """It became known how the answer of a finished request had ended; of others nothing changes."""
        if (found := self._awaited.pop(request, None)) is not None:
            end, awaited = found
            self.ranking.told(end.path(), awaited, answer_end)

    def gone(self, request: str) -> None:
        """A request will not be finished: what it held is evictable. Of others nothing changes."""
        if (running := self._running.pop(request, None)) is not None:
            self._release(running)
            self.ranking.gone(running.serial)

    def session_over(self, name: SessionName) -> None:
        """A session said that it is over: what only its requests asked for is worth nothing any more."""
        self.ranking.session_over(name)

    def _hold(self, node: ShadowNode, matched: int) -> tuple[ShadowNode, int]:
        """Locks what a new request found: its last node and its pages; returns what it uses of that."""
        self._lock(node)
        return node, matched

    def _release(self, running: _Running) -> None:
        self._private -= running.private
        self._unlock(running.end)

    # ---- the tree ----

    def _walk(self, pages: list[bytes]) -> tuple[ShadowNode, int]:
        """The longest known prefix: its last node, split off if need be, and its pages."""
        node, matched = self._root, 0
        while matched < len(pages) and (child := node.children.get(pages[matched])) is not None:
            run = pages[matched : matched + len(child.pages)]
            common = len(run)
            if run != child.pages:
                pairs = zip(child.pages, run, strict=False)
                common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                child = self._split(child, common)
            self._touch(child)
            node, matched = child, matched + common
        return node, matched

    def _touch(self, node: ShadowNode) -> None:
        self.ranking.touched(node)
        self._rank(node)

    def _rank(self, node: ShadowNode) -> None:
        """Enters the node into the order of the tier that it can be evicted from, if any."""
        if not node.children and not node.locks:
            self.ranking.enter(node)

    def _withdraw(self, node: ShadowNode) -> None:
        """The node cannot be evicted for the time being."""
        self.ranking.leave(node)

    def _new_node(self, parent: ShadowNode, pages: list[bytes], start: int) -> ShadowNode:
        self._serial += 1
        node = ShadowNode(self._serial, parent, pages, start)
        parent.children[pages[0]] = node
        return node

    def _split(self, node: ShadowNode, length: int) -> ShadowNode:
        assert node.parent is not None
        upper = self._new_node(node.parent, node.pages[:length], node.start)
        node.pages = node.pages[length:]
        node.start += length
        node.parent = upper
        upper.children[node.pages[0]] = node
        upper.locks = node.locks
        upper.on_device, upper.on_host = node.on_device, node.on_host
        self.ranking.split(upper, node)
        self._rank(node)
        return upper

    def _insert(self, pages: list[bytes], serial: int, *, is_chunk: bool = False) -> ShadowNode:
        """Adds the unknown rest of the path as one leaf; returns the path's last node.

        Args:
            is_chunk: whether more of the prompt is to come.
        """
        node, matched = self._walk(pages)
        return node if matched == len(pages) else self._add_leaf(node, pages, matched, serial)

    def _add_leaf(self, node: ShadowNode, pages: list[bytes], matched: int, serial: int) -> ShadowNode:
        leaf = self._new_node(node, pages[matched:], matched)
        self._withdraw(node)
        self.ranking.created(leaf, serial)
        self.used += len(leaf.pages)
        self._rank(leaf)
        return leaf

    def _lock(self, node: ShadowNode) -> None:
        for each in node.up():
            if not each.locks:
                self._withdraw(each)
            each.locks += 1

    def _unlock(self, node: ShadowNode) -> None:
        for each in node.up():
            each.locks -= 1
            self._rank(each)

    def _make_room(self, pages: int) -> None:
        self.evict(pages - (self.capacity - self.used - self._private))

    def evict(self, pages: int) -> None:
        """Gives leaves up until this many pages are free that were not, or nothing is evictable."""
        while pages > 0 and (victim := self.ranking.victim()) is not None:
            self._cut_tail(victim, pages)
            pages -= self._evict_leaf(victim)

    def _cut_tail(self, victim: ShadowNode, asked: int) -> None:
        """Leaves of a victim only a tail that is worth so many pages, where it may go in parts."""
        size = self._page_size
        kept = len(victim.pages) - tail_pages(asked * size, len(victim.pages) * size, size)
        if kept > 0 and self.ranking.gives_tail(victim):
            self.ranking.tail_cut(self._split(victim, kept), victim)
            self._withdraw(victim)

    def _evict_leaf(self, leaf: ShadowNode) -> int:
        """The pool gives the leaf up; returns how many pages that frees."""
        freed = len(leaf.pages)
        self.used -= freed
        self.evicted += freed
        self._remove(leaf)
        return freed

    def _remove(self, leaf: ShadowNode) -> None:
        """The leaf leaves the tree."""
        parent = leaf.parent
        assert parent is not None
        self.ranking.removed(leaf)
        del parent.children[leaf.pages[0]]
        leaf.detach()
        if not parent.is_root:
            self._rank(parent)

    def nodes(self) -> Iterator[ShadowNode]:
        """Every node but the root."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_integrity(self) -> None:
        """Asserts that links, locks and counts agree."""
        nodes = list(self.nodes())
        assert self.used == sum(len(node.pages) for node in nodes if node.on_device)
        assert self._private == sum(running.private for running in self._running.values())
        ends = [running.end for running in self._running.values()]
        for node in nodes:
            assert node.pages
            assert node.parent is not None
            assert node.parent.children[node.pages[0]] is node
            assert node.start == node.parent.start + len(node.parent.pages)
            assert node.locks == sum(node in end.up() for end in ends)

"""The memory of token paths: what the cache holds, and what became of what it has held, by namespace.

It follows the cache's own events. Paths that the cache holds are always known. Of the others, those that were
touched longest ago are forgotten first, from their ends on; where one was forgotten, its first page leaves a
mark, so that new text and forgotten text are told apart for a while longer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from sgl_importance.misses.path_tree import TOKEN_BYTES, KnownPath, PathNode, walk
from sgl_importance.misses.reason import Fate, PathVisit

Namespace = tuple[str | None, str | None]
"""Extra key and cache salt."""
SLACK = 1024
"""Outdated entries of the heap that are carried along at least, before it is built anew."""


class _Root(PathNode):
    """Where the paths of a namespace begin."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, b"", None, 0, None)
        self.namespace = namespace


class PathMemory:
    """Token paths by namespace, in whole pages.

    Args:
        page_size: tokens per page.
        gone_pages: pages to remember that the cache does not hold.
        max_marks: places to remember where something was forgotten.
        ahead: as of ``packed``.

    Attributes:
        forgot_at: Unix time when something was forgotten last; None as long as nothing was.
    """

    def __init__(self, page_size: int, *, gone_pages: int, max_marks: int, ahead: int = 0) -> None:
        assert page_size > 0
        assert gone_pages >= 0
        assert max_marks >= 0
        self.page_size = page_size
        self.ahead = ahead
        self.page_bytes = page_size * TOKEN_BYTES
        self.forgot_at: float | None = None
        self._gone_limit = gone_pages
        self._max_marks = max_marks
        self._roots: dict[Namespace, _Root] = {}
        self._gone_pages = 0
        self._gone: list[tuple[int, int, int, PathNode]] = []  # a heap: stamp, depth, serial
        self._serial = 0
        self._stamp = 0
        self._marks: OrderedDict[tuple[PathNode, bytes], float] = OrderedDict()
        # Namespaces by the first page of their paths, the last that was touched last.
        self._beginnings: dict[bytes, OrderedDict[Namespace, None]] = {}

    def __len__(self) -> int:
        """Pages that are remembered and not held."""
        return self._gone_pages

    # ---- what is known ----

    def root(self, namespace: Namespace) -> PathNode | None:
        """None where nothing of the namespace is known."""
        return self._roots.get(namespace)

    def path(self, namespace: Namespace, tokens: bytes) -> KnownPath:
        """What is known of these tokens in a namespace, as ``path_tree.walk``."""
        root = self._roots.get(namespace)
        return [] if root is None else list(walk(root, tokens, self.page_bytes))

    def marked(self, node: PathNode, page: bytes) -> float | None:
        """Unix time when what followed ``node`` with this page was forgotten; None where nothing was."""
        return self._marks.get((node, page))

    def sharing(self, first_page: bytes) -> Iterator[Namespace]:
        """Namespaces with paths that begin with this page, the one that was touched last first."""
        return reversed(self._beginnings.get(first_page, ()))

    # ---- events ----

    def asked(self, namespace: Namespace, tokens: bytes, path: KnownPath, visit: PathVisit) -> None:
        """A request asked for these tokens: what is known of them, their ``path``, is touched."""
        stamp = self._next_stamp()
        for node, matched in path:
            part = node if matched == node.length else self._cut(node, matched)
            part.visit = visit
            self._touch(part, stamp)
        self._moved_on(namespace, tokens)

    def holds(
        self, parent: PathNode | None, namespace: Namespace, tokens: bytes, visit: PathVisit
    ) -> PathNode:
        """The cache holds these tokens from now on.

        Args:
            parent: what they follow; None at the beginning.
            tokens: packed, of whole pages.

        Returns:
            The node that ends with them.
        """
        return self._enter(parent or self._make_root(namespace), namespace, tokens, None, visit)

    def not_kept(self, namespace: Namespace, tokens: bytes, fate: Fate, visit: PathVisit) -> None:
        """These tokens were computed; what of them the cache does not hold was not kept."""
        whole = tokens[: len(tokens) // self.page_bytes * self.page_bytes]
        if whole:
            self._enter(self._make_root(namespace), namespace, whole, fate, visit)
            self._forget(fate.time)

    def cut(self, end: PathNode, tokens: int) -> PathNode:
        """A node of the cache, which ends with ``end``, was cut in two.

        Args:
            tokens: of its second part.

        Returns:
            The node with which the first part ends.
        """
        node, left = end, tokens
        while left and left >= node.length:
            left -= node.length
            assert node.parent is not None, "a node of the cache lies within the tree"
            node = node.parent
        return self._cut(node, node.length - left) if left else node

    def gone(self, end: PathNode, tokens: int, fate: Fate) -> None:
        """The cache does not hold the ``tokens`` tokens up to ``end`` any more, nor what follows them."""
        node, left = end, tokens
        while left > 0:
            left -= node.length
            self._lose(node, fate)
            assert node.parent is not None
            node = node.parent
        assert left == 0, "nodes of the cache are cut where its paths part"
        self._forget(fate.time)

    def flushed(self, fate: Fate) -> None:
        """The cache holds nothing any more."""
        stack: list[PathNode] = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            if node.fate is None and node.parent is not None:
                self._lose(node, fate)
        self._forget(fate.time)

    # ---- how ----

    def _next_stamp(self) -> int:
        self._stamp += 1
        return self._stamp

    def _make_root(self, namespace: Namespace) -> PathNode:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = _Root(namespace)
        return root

    def _enter(
        self, start: PathNode, namespace: Namespace, tokens: bytes, fate: Fate | None, visit: PathVisit
    ) -> PathNode:
        """Puts a path behind ``start``; with a fate, what the cache holds keeps to be held."""
        assert tokens
        assert len(tokens) % self.page_bytes == 0
        stamp = self._next_stamp()
        node, at = start, 0
        for child, matched in list(walk(start, tokens, self.page_bytes)):
            part = child if matched == child.length else self._cut(child, matched)
            part.visit = visit
            if fate is None:
                self._regain(part)
            elif part.fate is not None:
                part.fate = fate
            self._touch(part, stamp)
            node, at = part, at + matched * TOKEN_BYTES
        if at < len(tokens):
            node = self._add(node, namespace, tokens[at:], fate, stamp, visit)
        above = start
        while above.parent is not None:
            self._touch(above, stamp)
            tokens, above = above.tokens, above.parent
        self._moved_on(namespace, tokens)
        return node

    def _add(
        self,
        parent: PathNode,
        namespace: Namespace,
        tokens: bytes,
        fate: Fate | None,
        stamp: int,
        visit: PathVisit,
    ) -> PathNode:
        page = tokens[: self.page_bytes]
        node = PathNode(parent, tokens, fate, stamp, visit)
        parent.children[page] = node
        if page in parent.marks:
            self._unmark(parent, page)
        if parent.parent is None:
            self._beginnings.setdefault(page, OrderedDict())[namespace] = None
        if fate is not None:
            self._gone_pages += node.length // self.page_size
            self._push(node)
        return node

    def _cut(self, node: PathNode, tokens: int) -> PathNode:
        front = node.cut(tokens, self.page_bytes)
        if front.fate is not None:
            self._push(front)
        return front

    def _touch(self, node: PathNode, stamp: int) -> None:
        node.stamp = stamp
        if node.fate is not None:
            self._push(node)

    def _moved_on(self, namespace: Namespace, tokens: bytes) -> None:
        """Of the namespaces whose paths begin so, this one was touched last."""
        sharing = self._beginnings.get(tokens[: self.page_bytes])
        if sharing is not None and namespace in sharing:
            sharing.move_to_end(namespace)

    def _lose(self, node: PathNode, fate: Fate) -> None:
        if node.fate is None:
            self._gone_pages += node.length // self.page_size
        node.fate = fate
        self._push(node)

    def _regain(self, node: PathNode) -> None:
        if node.fate is not None:
            self._gone_pages -= node.length // self.page_size
            node.fate = None

    def _push(self, node: PathNode) -> None:
        self._serial += 1
        heappush(self._gone, (node.stamp, -node.end, self._serial, node))
        if len(self._gone) > 2 * self._gone_pages + SLACK:
            latest = {id(entry[3]): entry for entry in self._gone if self._is_current(entry)}
            self._gone = list(latest.values())
            heapify(self._gone)

    @staticmethod
    def _is_current(entry: tuple[int, int, int, PathNode]) -> bool:
        stamp, _, _, node = entry
        return node.parent is not None and node.fate is not None and node.stamp == stamp

    def _forget(self, now: float) -> None:
        """Forgets the ends of the paths that were touched longest ago, until the bounds are kept."""
        while (excess := self._gone_pages - self._gone_limit) > 0:
            entry = heappop(self._gone)
            if not self._is_current(entry):
                continue
            node = entry[3]
            keep = node.length // self.page_size - excess
            if keep > 0:
                self._cut(node, keep * self.page_size)
            self._forget_node(node, now)
        while len(self._marks) > self._max_marks:
            (node, page), _ = self._marks.popitem(last=False)
            node.marks.remove(page)
            self._drop_empty(node)

    def _forget_node(self, node: PathNode, now: float) -> None:
        assert not node.children, "what follows a path is forgotten before it"
        parent, page = node.parent, node.tokens[: self.page_bytes]
        assert parent is not None
        for marked in list(node.marks):
            self._unmark(node, marked)
        del parent.children[page]
        node.parent = None
        self._gone_pages -= node.length // self.page_size
        self._marks[parent, page] = now
        parent.marks.add(page)
        self.forgot_at = now
        if isinstance(parent, _Root):
            del self._beginnings[page][parent.namespace]
            if not self._beginnings[page]:
                del self._beginnings[page]

    def _unmark(self, node: PathNode, page: bytes) -> None:
        node.marks.remove(page)
        del self._marks[node, page]

    def _drop_empty(self, node: PathNode) -> None:
        """Forgets a namespace of which nothing is known."""
        if isinstance(node, _Root) and not node.children and not node.marks:
            del self._roots[node.namespace]

    # ---- checks ----

    def held_pages(self) -> int:
        """Pages that the cache holds, counted node by node."""
        pages = 0
        stack: list[PathNode] = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            pages += 0 if node.fate else node.length // self.page_size
        return pages

    def check_integrity(self) -> None:
        """Asserts that counts, marks and the order of forgetting agree with the paths."""
        pages = marks = 0
        current = {id(entry[3]) for entry in self._gone if self._is_current(entry)}
        for root in self._roots.values():
            stack: list[PathNode] = [root]
            while stack:
                node = stack.pop()
                marks += len(node.marks)
                assert all((node, page) in self._marks for page in node.marks)
                assert not node.marks & node.children.keys(), "what is known is not marked as forgotten"
                for page, child in node.children.items():
                    assert child.parent is node
                    assert child.tokens.startswith(page)
                    assert child.end == node.end + child.length
                    assert node is root or (child.stamp <= node.stamp and (node.fate is None or child.fate))
                    stack.append(child)
                if node.fate is not None:
                    pages += node.length // self.page_size
                    assert id(node) in current, "what is not held can be forgotten"
        assert pages == self._gone_pages <= self._gone_limit, (pages, self._gone_pages)
        assert marks == len(self._marks) <= self._max_marks, (marks, len(self._marks))
        beginnings = {(page, root.namespace) for root in self._roots.values() for page in root.children}
        assert beginnings == {(page, each) for page, sharing in self._beginnings.items() for each in sharing}

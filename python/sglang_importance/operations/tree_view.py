"""The radix tree from its root, as JSON: the largest nodes one by one, the rest by its size."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Generator
from typing import Any

from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sglang_importance.cache.component import ImportanceComponent
from sglang_importance.cache.importance_cache import ImportanceRadixCache
from sglang_importance.operations.job import Document, Job, NotFound, Slices
from sglang_importance.operations.snapshot import describe_cache, describe_chain, describe_node
from sglang_importance.upstream.nodes import tokens_of

SCHEMA_VERSION = 1
DEFAULT_LIMIT = 200
MAX_LIMIT = 1000
DEFAULT_DEPTH = 64
LABEL_TOKENS = 24
"""Leading tokens of a node that come with it, for a label."""


def tree(cache: ImportanceRadixCache, arguments: Document) -> Job:
    """The operation behind ``GET /kv_importance/tree``; its arguments are those of ``tree_view``."""
    document = yield from tree_view(cache, **arguments)
    if (chain := describe_chain()) is not None:
        document["store_tiers"] = chain
    return document


def find_node(component: ImportanceComponent, node_id: int) -> UnifiedTreeNode:
    """The node of an id.

    Raises:
        NotFound: it left the tree, or never was.
    """
    core = component.state.tree.core
    node: UnifiedTreeNode | None = core._node_arena.get(node_id)
    if node is None or node is core.root_node:
        raise NotFound(
            f"node {node_id} is not in the tree: it was evicted, merged into another, or never was"
        )
    return node


def tree_view(
    cache: ImportanceRadixCache, *, root: int | None, depth: int, min_tokens: int, limit: int
) -> Job:
    """Nodes parents first, siblings in the tree's order.

    A generator, as ``snapshot.snapshot`` is. The tree may change between its slices: nodes that leave or are
    cut meanwhile are left out.

    Args:
        cache: the cache to describe.
        root: node to begin with; None for the root, which holds nothing and is not listed itself.
        depth: levels of nodes, the first included.
        min_tokens: nodes that hold fewer tokens, themselves and below, are left out.
        limit: nodes to list; those with most tokens, themselves and below, come first.

    Returns:
        The document of ``GET /kv_importance/tree``. ``more`` says how many nodes were left out below a
        node, at the top level below the root, and how many tokens they hold.

    Raises:
        NotFound: there is no node ``root``.
    """
    component = cache.importance
    if not component.state.faults.is_learning:
        nothing = {"nodes": 0, "tokens": 0}
        return {
            "version": SCHEMA_VERSION,
            **describe_cache(cache, stored_tokens=0),
            "total": nothing,
            "root": root,
            "nodes": [],
            "more": nothing,
        }
    top = component.state.tree.core.root_node if root is None else find_node(component, root)
    sums = _Sums(component)
    yield from sums.add_up()
    pause = Slices()

    shown: dict[int | None, list[UnifiedTreeNode]] = defaultdict(list)  # by parent; None for the first level
    queue: list[tuple[int, int, int, int | None, UnifiedTreeNode]] = []
    number, above, level, siblings = 0, None, 0, [top] if root is not None else sums.children[top.id]
    while True:
        if level < depth:
            for node in (yield from sums.largest(siblings, limit, pause)):
                heapq.heappush(queue, (-sums.tokens[node.id], node.id, level + 1, above, node))
        if not queue or number == limit:
            break
        negative_tokens, node_id, level, its_parent, node = heapq.heappop(queue)
        if -negative_tokens < min_tokens:
            break
        number += 1
        shown[its_parent].append(node)
        above, siblings = node_id, sums.children[node_id]
        if pause.is_due():
            yield

    first_ids = {node.id for node in shown[None]}
    rows: dict[int, dict[str, Any]] = {}
    stack = sums.in_order(shown[None])[::-1]
    while stack:
        node = stack.pop()
        is_reached = node.id in first_ids or (node.parent is not None and node.parent.id in rows)
        if node in component.state.tree and is_reached:
            rows[node.id] = sums.describe(node, shown[node.id])
            stack.extend(sums.in_order(shown[node.id])[::-1])
        if pause.is_due():
            yield
    total = None if root is None else top.id
    return {
        "version": SCHEMA_VERSION,
        **describe_cache(cache, sums.stored_tokens),
        "total": {"nodes": sums.nodes[None], "tokens": sums.tokens[None]},
        "root": root,
        "nodes": list(rows.values()),
        "more": sums.left_out(sums.nodes[total], sums.tokens[total], shown[None]),
    }


class _Sums:
    """Sums over each node and all below it; the key None stands for the whole tree."""

    def __init__(self, component: ImportanceComponent) -> None:
        self._component = component
        self.children: dict[int, list[UnifiedTreeNode]] = defaultdict(list)
        self.tokens: dict[int | None, int] = defaultdict(int)
        self.nodes: dict[int | None, int] = defaultdict(int)
        self._own_tokens: dict[int, int] = {}
        self._place: dict[int, int] = {}  # among the siblings
        self.reuse: dict[int, float] = {}
        self.stored_tokens = 0

    def add_up(self) -> Job:
        tree, pause = self._component.state.tree, Slices()
        listed: list[tuple[UnifiedTreeNode, int]] = []
        for node in tree.nodes():
            assert node.parent is not None
            listed.append((node, node.parent.id))
            if pause.is_due():
                yield
        for node, parent in reversed(listed):  # children before parents
            metadata = tree.metadata(node)
            self._place[node.id] = len(self.children[parent])
            self.children[parent].append(node)
            self._own_tokens[node.id] = metadata.tokens
            own = self._component.state.policy.reuse_probability(metadata)
            self.reuse[node.id] = max(own, self.reuse.get(node.id, 0.0))
            self.reuse[parent] = max(self.reuse[node.id], self.reuse.get(parent, 0.0))
            self.tokens[node.id] += metadata.tokens
            self.nodes[node.id] += 1
            self.tokens[parent] += self.tokens[node.id]
            self.nodes[parent] += self.nodes[node.id]
            self.tokens[None] += metadata.tokens
            self.nodes[None] += 1
            self.stored_tokens += metadata.tokens if metadata.in_storage else 0
            if pause.is_due():
                yield
        return {}

    def largest(
        self, siblings: list[UnifiedTreeNode], limit: int, pause: Slices
    ) -> Generator[None, None, list[UnifiedTreeNode]]:
        """Those of most tokens, themselves and below; a node may have a child for every session."""
        heap: list[tuple[int, int, UnifiedTreeNode]] = []
        for node in siblings:
            heapq.heappush(heap, (self.tokens[node.id], -node.id, node))
            if len(heap) > limit:
                heapq.heappop(heap)
            if pause.is_due():
                yield
        return [node for *_, node in heap]

    def in_order(self, siblings: list[UnifiedTreeNode]) -> list[UnifiedTreeNode]:
        """In the tree's order."""
        return sorted(siblings, key=lambda node: self._place[node.id])

    def describe(self, node: UnifiedTreeNode, shown: list[UnifiedTreeNode]) -> dict[str, Any]:
        component = self._component
        row = describe_node(
            component, node, loss=component.leaves.loss(node), p_reuse=self.reuse.get(node.id, 0.0)
        )
        nodes, tokens = self.nodes[node.id], self.tokens[node.id]
        row["subtree"] = {"nodes": nodes, "tokens": tokens}
        row["more"] = self.left_out(nodes - 1, tokens - self._own_tokens[node.id], shown)
        row["leading_ids"] = list(tokens_of(node)[:LABEL_TOKENS])
        return row

    def left_out(self, nodes: int, tokens: int, shown: list[UnifiedTreeNode]) -> dict[str, int]:
        """Of so many nodes and tokens, those that are not below nodes that are shown."""
        return {
            "nodes": nodes - sum(self.nodes[node.id] for node in shown),
            "tokens": tokens - sum(self.tokens[node.id] for node in shown),
        }

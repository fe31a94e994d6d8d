"""Looks up the importance of a page by its chained digest, as the ``ImportanceSource`` protocol has it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sgl_importance.interface import Importance
from sgl_importance.nodes.ghosts import GhostTable
from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.nodes.page_index import PageIndex

SLICE_PAGES = 512  # digests that take about half a millisecond


class HashedTree(Protocol):
    """The part of ``AnnotatedTree`` that a look-up uses."""

    page_size: int

    def metadata(self, node: UnifiedTreeNode) -> NodeMetadata: ...

    def known(self, node: UnifiedTreeNode) -> NodeMetadata | None: ...

    def iterate_pages(self, node: UnifiedTreeNode) -> Iterator[bytes]: ...

    def page_digests(self, node: UnifiedTreeNode) -> list[bytes]: ...

    def nodes(self) -> Iterator[UnifiedTreeNode]: ...


@dataclass(slots=True)
class _Started:
    """A node whose pages are being hashed, over as many slices as it takes."""

    node: UnifiedTreeNode
    pages: Iterator[bytes]
    digests: list[bytes]


class PageSource:
    """Answers ``get_importance`` for pages of the tree and for ghosts.

    Digests are computed at look-ups: a tree without look-ups pays one dictionary entry per node. Each
    look-up first hashes at most ``SLICE_PAGES`` pages of nodes that came since the one before, so the
    scheduler is never held for longer; until all are hashed, the youngest may be answered with None.

    Args:
        tree: whose nodes are followed.
        ghosts: of pages that left the tree.
    """

    def __init__(self, tree: HashedTree, ghosts: GhostTable) -> None:
        self.index = PageIndex(tree.page_size)
        self._tree = tree
        self._ghosts = ghosts
        # Emptied from its front, which takes a dict longer with each that has gone.
        self._unhashed: OrderedDict[int, UnifiedTreeNode] = OrderedDict()
        self._started: _Started | None = None

    def get_importance(self, key: bytes) -> Importance | None:
        """As ``sgl_importance.interface.ImportanceSource``; on the scheduler thread only."""
        if self._unhashed:
            self.catch_up()
        place = self.index.find(key)
        if place is not None:
            return place.node.importance.page_importance(place.page)
        return self._ghosts.get_importance(key)

    def catch_up(self, max_pages: int = SLICE_PAGES) -> bool:
        """Hashes pages of nodes that are not indexed yet; whether none is left."""
        while self._unhashed and max_pages > 0:
            started = self._started or self._start()
            for digest in started.pages:
                started.digests.append(digest)
                max_pages -= 1
                if max_pages == 0:
                    break
            metadata = self._tree.metadata(started.node)
            if len(started.digests) == metadata.importance.num_pages:
                self.index.add(metadata, started.digests)
                del self._unhashed[started.node.id]
                self._started = None
        return not self._unhashed

    def _start(self) -> _Started:
        node = next(iter(self._unhashed.values()))  # parents before children
        self._started = _Started(node, self._tree.iterate_pages(node), [])
        return self._started

    # ---- tree events ----

    def created(self, node: UnifiedTreeNode) -> None:
        self._unhashed[node.id] = node

    def split(self, new_parent: UnifiedTreeNode, child: UnifiedTreeNode) -> None:
        """``child`` was cut; its metadata was already."""
        if self._unhashed.pop(child.id, None) is None:
            self.index.split(self._tree.metadata(new_parent), self._tree.metadata(child))
            return
        self._forget_start(child)
        self._unhashed[new_parent.id] = new_parent
        self._unhashed[child.id] = child

    def removed(self, node: UnifiedTreeNode) -> None:
        if self._unhashed.pop(node.id, None) is None:
            self.index.remove(self._tree.metadata(node))
        else:
            self._forget_start(node)

    def reset(self) -> None:
        """The tree was emptied."""
        self.index.clear()
        self._unhashed.clear()
        self._started = None

    def _forget_start(self, node: UnifiedTreeNode) -> None:
        if self._started is not None and self._started.node is node:
            self._started = None

    def check_integrity(self) -> None:
        """Asserts that every node is indexed or will be, with the digests of its pages."""
        self.index.check_integrity()
        indexed = 0
        for node in self._tree.nodes():
            known = self._tree.known(node)
            if known is None or node.id in self._unhashed:
                continue
            indexed += known.importance.num_pages
            for page, digest in enumerate(self._tree.page_digests(node)):
                assert self.index.find(digest) == (known, page), (node.id, page)
        assert indexed == len(self.index), (indexed, len(self.index))

"""Index of pages by chained digest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sgl_importance.nodes.node_metadata import NodeMetadata


class PagePlace(NamedTuple):
    """A page of a node.

    Attributes:
        node: the node that holds it.
        page: its number within the node.
    """

    node: NodeMetadata
    page: int


class PageIndex:
    """Finds pages of nodes in O(1), and follows nodes as they are cut and removed without hashing again.

    Args:
        page_size: tokens per page.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        # Pages are numbered from the root, so that a cut moves only those that get another node.
        self._places: dict[bytes, tuple[NodeMetadata, int]] = {}
        self._digests: dict[NodeMetadata, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def clear(self) -> None:
        self._places.clear()
        self._digests.clear()

    def add(self, node: NodeMetadata, digests: list[bytes]) -> None:
        """Takes in a node that is not in it, with the chained digests of its pages."""
        assert node not in self._digests
        assert len(digests) == node.importance.num_pages, (len(digests), node.importance.num_pages)
        self._digests[node] = digests
        self._place(node, digests)

    def split(self, prefix: NodeMetadata, node: NodeMetadata) -> None:
        """``node`` was cut: its first pages are ``prefix`` now. Both know their depth and tokens already."""
        digests = self._digests[node]
        pages = prefix.importance.num_pages
        self._digests[prefix], self._digests[node] = digests[:pages], digests[pages:]
        self._place(prefix, digests[:pages])

    def remove(self, node: NodeMetadata) -> None:
        """Forgets a node; one that is not in it does no harm."""
        for digest in self._digests.pop(node, ()):
            self._places.pop(digest, None)

    def find(self, digest: bytes) -> PagePlace | None:
        place = self._places.get(digest)
        if place is None:
            return None
        node, page = place
        return PagePlace(node, page - node.depth // self._page_size)

    def _place(self, node: NodeMetadata, digests: Sequence[bytes]) -> None:
        start = node.depth // self._page_size
        for page, digest in enumerate(digests, start):
            self._places[digest] = (node, page)

    def check_integrity(self) -> None:
        """Asserts that both directions agree."""
        assert len(self._places) == sum(map(len, self._digests.values())), (
            "a page is of two nodes, or of none"
        )
        for node, digests in self._digests.items():
            assert len(digests) == node.importance.num_pages, (len(digests), node.importance.num_pages)
            for page, digest in enumerate(digests):
                assert self.find(digest) == (node, page), (digest.hex(), page)

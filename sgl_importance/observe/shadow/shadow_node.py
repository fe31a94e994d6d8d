"""A node of a shadow tree: names of pages in place of their KV."""

from __future__ import annotations

from collections.abc import Iterator

from sgl_importance.nodes.node_metadata import NodeMetadata


class ShadowNode:
    """A run of pages without a branch.

    Attributes:
        id: unique within its cache, rising.
        pages: chained digests, root side first; empty for the root.
        start: pages between the root and the node.
        children: by the digest of their first page.
        locks: running requests whose path leads through the node.
        on_device: whether the device has its KV.
        on_host: whether the host has a copy.
        last_use: for recency orders.
        metadata: for importance orders.
    """

    __slots__ = (
        "children",
        "id",
        "last_use",
        "locks",
        "metadata",
        "on_device",
        "on_host",
        "pages",
        "parent",
        "start",
    )

    def __init__(self, node_id: int, parent: ShadowNode | None, pages: list[bytes], start: int) -> None:
        self.id = node_id
        self.parent = parent
        self.pages = pages
        self.start = start
        self.children: dict[bytes, ShadowNode] = {}
        self.locks = 0
        self.on_device, self.on_host = True, False
        self.last_use = 0
        self.metadata: NodeMetadata | None = None

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def detach(self) -> None:
        """The node left the tree. Who still names it, as the end of an answer, keeps nothing else alive."""
        self.parent, self.pages = None, []

    def path(self) -> list[ShadowNode]:
        """Nodes from below the root down to this one."""
        return list(self.up())[::-1]

    def up(self) -> Iterator[ShadowNode]:
        """This node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

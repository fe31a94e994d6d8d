"""What the policy knows of one radix-tree node. Knows nothing of the tree that it hangs on."""

from __future__ import annotations

from sgl_importance.importance import NodeImportance
from sgl_importance.reuse import BlockType, reuse_class


class NodeMetadata:
    """Facts about one node, kept while it lives on any tier.

    Attributes:
        tokens: tokens that the node holds.
        depth: tokens between the root and the node.
        importance: what attention said about its pages.
        block_type: prompt or generated text.
        accesses: admitted requests that found the node in the cache.
        last_access: clock of the last such request, or of the insertion; in admitted requests.
        in_storage: whether a copy was handed to the storage tier.
        doomed: ``observe`` only: importance would have evicted the node, stock kept it.
        digest: chained hash of the tokens up to the node's end; None until somebody asks.
    """

    __slots__ = (
        "accesses",
        "block_type",
        "depth",
        "digest",
        "doomed",
        "importance",
        "in_storage",
        "last_access",
        "tokens",
    )

    def __init__(self, *, tokens: int, depth: int, page_size: int, clock: int) -> None:
        assert tokens > 0
        assert tokens % page_size == 0, f"{tokens} tokens are not whole pages of {page_size}"
        self.tokens = tokens
        self.depth = depth
        self.importance = NodeImportance(tokens // page_size)
        self.block_type = BlockType.PROMPT
        self.accesses = 0
        self.last_access = clock
        self.in_storage = False
        self.doomed = False
        self.digest: bytes | None = None

    @property
    def reuse_class(self) -> int:
        return reuse_class(self.block_type, self.accesses)

    def split(self, prefix_tokens: int, page_size: int) -> NodeMetadata:
        """Cuts the first ``prefix_tokens`` off into the returned node; this one keeps the rest."""
        assert prefix_tokens % page_size == 0
        prefix = NodeMetadata(
            tokens=prefix_tokens, depth=self.depth, page_size=page_size, clock=self.last_access
        )
        prefix.importance = self.importance.split(prefix_tokens // page_size)
        prefix.block_type = self.block_type
        prefix.accesses = self.accesses
        prefix.in_storage = self.in_storage
        prefix.doomed = self.doomed
        self.tokens -= prefix_tokens
        self.depth += prefix_tokens
        return prefix

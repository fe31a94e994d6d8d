"""Facts of sglang's tree nodes that its annotations leave open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

NodeId = int
"""By which sglang's tree knows a node."""


def key_of(node: UnifiedTreeNode) -> RadixKey:
    """The token ids of a node, with their namespace; of no tokens for the root."""
    assert node.key is not None, "sglang gives a node its key when it makes it"
    return node.key


def tokens_of(node: UnifiedTreeNode) -> Sequence[int]:
    """The token ids of a node."""
    return tokens_in(key_of(node))


def tokens_in(key: RadixKey) -> Sequence[int]:
    """The token ids of a node's key. One of pairs of tokens (EAGLE's trees) also has the one behind them."""
    tokens: Sequence[int] = key.raw_token_ids()
    return tokens if len(tokens) == len(key) else tokens[: len(key)]

"""What is handed to the storage tier, and what became of it.

With a host tier it is nodes, which stay there until they are written. Where host memory is only a buffer
(``hicache_host_memory_mode``) it is copies, and their nodes may leave the tree meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_importance.tree.ranks import Ranks
from sglang_importance.upstream.differences import is_believed_stored
from sglang_importance.upstream.nodes import NodeId


class BufferedCopy(NamedTuple):
    """Tokens in the buffer.

    Attributes:
        node_id: the node that ends with them; its first tokens may be a node of their own by now.
        tokens: of the copy.
    """

    node_id: NodeId
    tokens: int


@dataclass(frozen=True, slots=True)
class StorageWrite:
    """A write that ended.

    Attributes:
        node_id: the node that was handed over; its first tokens may be a node of their own by now, and in
            buffer mode it may have left the tree.
        tokens: that were handed over.
        is_stored: whether every rank wrote all of them.
    """

    node_id: NodeId
    tokens: int
    is_stored: bool


def buffered_copy(cache: UnifiedRadixCache, ack_id: int) -> BufferedCopy | None:
    """The copy that upstream is about to hand to storage; None where nodes are handed over."""
    if cache.buffer_pipeline is None:
        return None
    copy = cache.buffer_pipeline.ongoing_write_through[ack_id]
    return BufferedCopy(copy.intent.snapshot.node_id, len(copy.host_indices))


def is_stored_already(cache: UnifiedRadixCache, node: UnifiedTreeNode) -> bool:
    """Whether upstream will not hand over a new node, because storage has its pages or is about to.

    Always False with a host tier, which hands over every node.
    """
    if cache.buffer_pipeline is None or not cache.enable_storage or not node.hash_value:
        return False
    return is_believed_stored(cache, node.hash_value)


def ended_writes(cache: UnifiedRadixCache, count: int | None, ranks: Ranks) -> Sequence[StorageWrite]:
    """The writes that upstream is about to take for done: it acknowledges them whether or not they succeeded.

    Called by all ranks, which hold the same nodes, and each the pages of its own heads.

    Args:
        count: of acknowledgements, the same on all ranks; None, where a rank drains alone, reads none.
    """
    controller: Any = cache.cache_controller
    if not count:
        return ()
    waiting = controller.ack_backup_queue
    with waiting.mutex:  # the thread that writes puts more behind them
        acknowledged = list(islice(waiting.queue, count))
    # Where attention is latent, every rank has the same pages, and one writes them.
    writes = not getattr(controller, "backup_skip", False)
    handed_over = {
        node_id: operation
        for operation in acknowledged
        if (node_id := _handed_over(cache, operation.id)) is not None
    }
    missing = ranks.union(
        node_id
        for node_id, operation in handed_over.items()
        if writes and operation.completed_tokens < len(operation.hash_value) * controller.page_size
    )
    return [
        StorageWrite(node_id, len(operation.host_indices), node_id not in missing)
        for node_id, operation in handed_over.items()
    ]


def _handed_over(cache: UnifiedRadixCache, operation_id: int) -> NodeId | None:
    """The node whose pages an operation writes; None of what upstream does not wait for any more."""
    if cache.buffer_pipeline is not None:
        copy = cache.buffer_pipeline.ongoing_backup.get(operation_id)
        return None if copy is None else copy.intent.snapshot.node_id
    held = cache.ongoing_backup.get(operation_id)
    return None if held is None else held[0]

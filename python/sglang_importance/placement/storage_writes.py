"""What became of the nodes that were handed to the storage tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_importance.tree.ranks import Ranks
from sglang_importance.upstream.nodes import NodeId


@dataclass(frozen=True, slots=True)
class StorageWrite:
    """A write that ended.

    Attributes:
        node_id: the node that was handed over; its first tokens may be a node of their own by now.
        tokens: that were handed over.
        is_stored: whether every rank wrote all of them.
    """

    node_id: NodeId
    tokens: int
    is_stored: bool


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
        cache.ongoing_backup[operation.id][0]: operation
        for operation in acknowledged
        if operation.id in cache.ongoing_backup
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

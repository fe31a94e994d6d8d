"""A host and a storage tier under the real tree: no bytes move, the books are upstream's own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from queue import Queue
from types import SimpleNamespace

import torch
from sglang.srt.managers.cache_controller import HiCacheAck
from sglang.srt.mem_cache.buffer_mode.pipeline import BufferModePipeline
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


class HostSlots:
    """The host pool's books: which slots are free."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.entry_map: dict[object, object] = {}
        self._free = deque(range(size))
        self.anchor_entry = SimpleNamespace(
            host_pool=SimpleNamespace(shared_allocation_domain=None), host_evict_fn=None
        )

    def available_size(self) -> int:
        return len(self._free)

    def alloc(self, size: int) -> torch.Tensor | None:
        if size > len(self._free):
            return None
        return torch.tensor([self._free.popleft() for _ in range(size)])

    def free(self, slots: torch.Tensor, pool: object = None) -> None:
        self._free.extend(slots.tolist())
        assert len(set(self._free)) == len(self._free), "a slot was freed twice"

    def clear(self) -> None:
        self._free = deque(range(self.size))


class LowerTiers:
    """Stands in for HiCache's controller: copies are acknowledged when the test says so, in order.

    Attributes:
        stored: tokens of the nodes that storage took, in order.
        is_full: whether storage takes nothing; it acknowledges all the same, as upstream's controller does.
    """

    def __init__(self, host_tokens: int, write_policy: str, *, storage: bool) -> None:
        self.mem_pool_host = HostSlots(host_tokens)
        self.write_policy = write_policy
        self.enable_storage = storage
        self.ack_write_queue: list[HiCacheAck] = []
        self.ack_backup_queue: Queue[SimpleNamespace] = Queue()
        nothing: Queue[SimpleNamespace] = Queue()
        self.prefetch_hit_queue = self.ack_prefetch_queue = self.host_mem_release_queue = nothing
        self.prefetch_tokens_occupied = 0
        self.is_full = False
        self.page_size = 0  # of the cache
        self.stored: list[tuple[int, ...]] = []
        self._writing: list[int] = []
        self._storing: list[SimpleNamespace] = []
        self._operations = 0

    def reset(self) -> None:
        self.ack_write_queue.clear()
        self._writing.clear()
        self._storing.clear()

    def write(
        self, device_value: torch.Tensor, *, node_id: int, extra_pools: object, flush: bool
    ) -> torch.Tensor | None:
        slots = self.mem_pool_host.alloc(len(device_value))
        if slots is not None:
            self._writing.append(node_id)
        return slots

    def start_writing(self) -> None:
        event = SimpleNamespace(synchronize=lambda: None)
        self.ack_write_queue += [HiCacheAck(event, event, [node_id]) for node_id in self._writing]
        self._writing.clear()

    def write_storage(
        self,
        host_value: torch.Tensor,
        token_ids: Sequence[int],
        hash_value: Sequence[str],
        *_: object,
        extra_pools: object = None,
    ) -> int:
        self._operations += 1
        if not self.is_full:
            self.stored.append(tuple(token_ids))
        operation = SimpleNamespace(
            id=self._operations,
            host_indices=host_value,
            hash_value=hash_value,
            completed_tokens=0 if self.is_full else len(host_value),
        )
        self._storing.append(operation)
        return self._operations

    def fail_started(self) -> None:
        """Nothing of the writes to storage that are under way is written."""
        for operation in self._storing:
            operation.completed_tokens = 0
        self.stored.clear()

    @classmethod
    def attach(
        cls,
        cache: UnifiedRadixCache,
        *,
        host_tokens: int,
        write_policy: str,
        storage: bool = True,
        is_buffer: bool = False,
    ) -> LowerTiers:
        """Puts the tiers under a cache, as ``init_hicache`` does.

        Args:
            is_buffer: host memory is no tier, only a buffer for what is on its way.
        """
        tiers = cls(host_tokens, write_policy, storage=storage)
        tiers.page_size = cache.page_size
        cache.cache_controller = tiers
        cache.host_pool_group = tiers.mem_pool_host
        cache.components[ComponentType.FULL]._full_kv_pool_host = tiers.mem_pool_host
        cache.enable_storage = storage
        cache.tree_core.set_hicache_enabled()
        cache.write_through_threshold = 1 if write_policy == "write_through" else 2
        cache.is_write_back = write_policy == "write_back"
        if is_buffer:
            cache.host_memory_mode = "buffer_only"
            cache.tree_core.set_host_memory_buffer_only()
            cache.buffer_pipeline = BufferModePipeline(cache, 0, write_backlog_cap=2 * host_tokens)
        return tiers

    def hand_over(self, cache: UnifiedRadixCache) -> None:
        """Every copy under way reaches host memory, and is on its way to storage."""
        if cache.buffer_pipeline is not None:
            cache.buffer_pipeline.flush_pending_writes()
        self.start_writing()
        cache.writing_check(finish_count=len(self.ack_write_queue))

    def settle(self, cache: UnifiedRadixCache) -> None:
        """Every copy under way arrives."""
        self.hand_over(cache)
        for operation in self._storing:
            self.ack_backup_queue.put(operation)
        ended = len(self._storing)
        self._storing.clear()
        none = dict.fromkeys(("n_storage_hit", "n_ack_prefetch", "n_release"), 0)
        cache._drain_storage_control_queues_impl(
            **none, n_backup=ended, extra_release_counts=None, log_metrics=False
        )

"""The radix cache that sglang builds under ``--kv-policy observe`` and ``importance``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sgl_importance.interface import Importance
from sgl_importance.metrics_table import FaultPlace
from sgl_importance.misses.reason import NeededBy
from sglang_importance.cache.component import ImportanceComponent
from sglang_importance.cache.room import RoomNeed
from sglang_importance.placement.storage_writes import buffered_copy, ended_writes

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import (
        CacheRequestHandle,
        EvictResult,
        InitLoadBackParams,
        MatchPrefixParams,
        MatchResult,
    )
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import PrefetchOperation

    # It brings numba, which the HTTP process would load for nothing.
    from sglang_importance.sparse.pool import TieredKVPool

_ANY_NUMBER = 1 << 40
"""More tokens than any pool has."""


class ImportanceRadixCache(UnifiedRadixCache):
    """Upstream's unified radix cache whose full-attention component carries importance."""

    _exhausted: tuple[int, ...] | None = None
    """After an eviction that fell short: until these change, there is no use in another."""

    @property
    def importance(self) -> ImportanceComponent:
        component = self.components[ComponentType.FULL]
        assert isinstance(component, ImportanceComponent)
        return component

    @property
    def python_core(self) -> UnifiedTreeCore:
        """The tree; a registry with our component makes sglang build it in Python."""
        core = self.tree_core
        assert isinstance(core, UnifiedTreeCore)
        return core

    @property
    def room_need(self) -> RoomNeed | None:
        """For whom room is being made; None where no account is kept."""
        misses = self.importance.misses
        return None if misses is None else misses.need

    def making_room(self, work: NeededBy, *requests: Any) -> AbstractContextManager[None]:
        """While it is entered, what is evicted makes room for these requests."""
        need = self.room_need
        return nullcontext() if need is None else need.needed_by(work, requests)

    def get_importance(self, key: bytes) -> Importance | None:
        """As ``sgl_importance.interface.ImportanceSource``: for connectors in the scheduler's process.

        None of every page once a fault has ended learning, and of what is no key.
        """
        state = self.importance.state
        if not state.faults.is_learning:
            return None
        return state.faults.beside(FaultPlace.OPERATION, state.tree.source.get_importance, key)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        dense_prefix = self.importance.dense_prefix
        found: MatchResult = super().match_prefix(
            params if dense_prefix is None else dense_prefix.limit(params)
        )
        return found

    def _evict(self, params: EvictParams, *args: Any, **named: Any) -> EvictResult:
        # Later releases walk on until an allocation fits: their walks are begun for all that could go.
        self.importance.wanted_tokens = params.num_tokens
        return super()._evict(params, *args, **named)

    def init_load_back(self, params: InitLoadBackParams) -> Any:
        with self.making_room(NeededBy.LOAD_BACK, params.req), self._bringing(params.req):
            return super().init_load_back(params)

    def _bringing(self, req: Req | None) -> AbstractContextManager[None]:
        """Without a host tier, storage is loaded to the device with what is loaded back for a request."""
        if self.buffer_pipeline is None or req is None:
            return nullcontext()
        return self.importance.bringing_from_storage(req.rid)

    def can_free(self, tokens: int, *, loaded_back: int = 0, loaded_windows: int = 0) -> bool:
        """Whether so many tokens of the device are free, after an eviction where need be.

        An eviction can return less than counts as evictable. Under ``write_back`` a node whose copy finds no
        room on the host is dropped, but not while storage reads or writes what is below it. Without both this
        cannot be, and nothing is evicted here.

        Args:
            tokens: to be computed; they take room in every pool.
            loaded_back: tokens that come from the host besides.
            loaded_windows: of these, what takes room in the pool of sliding windows, too.
        """
        if not (self.is_write_back and self.enable_storage):
            return True
        wanted = tokens + loaded_back, tokens + loaded_windows
        short = self._short_of(*wanted)
        if any(short) and self._room_facts(short) != self._exhausted:
            self.evict_for_alloc(EvictParams(num_tokens=short[0], swa_num_tokens=short[1]))
            short = self._short_of(*wanted)
            if any(short):
                self._exhausted = self._room_facts(short)
        return not any(short)

    def _free_tokens(self) -> tuple[int, int]:
        """In the pool, or in that of full attention; and in that of sliding windows, where it can fill up."""
        allocator: Any = self.token_to_kv_pool_allocator
        if not self.supports_swa() or getattr(allocator, "swa_req_ring", False):
            return allocator.available_size(), _ANY_NUMBER
        return allocator.full_available_size(), allocator.swa_available_size()

    def _short_of(self, tokens: int, in_windows: int) -> tuple[int, int]:
        """What is missing in either pool."""
        free, free_in_windows = self._free_tokens()
        return max(0, tokens - free), max(0, in_windows - free_in_windows)

    def _room_facts(self, short: tuple[int, int]) -> tuple[int, ...]:
        """What changes when an eviction that fell short may do better, and the pools in which it did."""
        evictable = self.evictable_size(), self.swa_evictable_size()
        under_way = len(self.ongoing_backup), len(self.ongoing_prefetch)
        return *self._free_tokens(), *evictable, *under_way, *map(bool, short)

    def prefetch_from_storage(self, request: CacheRequestHandle, *args: Any, **kwargs: Any) -> Any:
        with self.making_room(NeededBy.PREFETCH, request):
            return super().prefetch_from_storage(request, *args, **kwargs)

    def stop_prefetching(self, request: CacheRequestHandle) -> None:
        """A waiting request gets no more from storage than it has; nothing happens where nothing is read."""
        if request in self.ongoing_prefetch:
            super().release_aborted_request(request)

    def reset(self) -> None:
        super().reset()
        self.importance.watch_tree()

    def release_aborted_request(self, request: CacheRequestHandle) -> None:
        super().release_aborted_request(request)
        self.importance.gave_up_waiting(request.rid)

    def backup_node_for_write_back(self, node_id: int) -> bool:
        backups = self.importance.backups
        if backups is not None and not backups.copies_with_state(node_id):
            return False  # upstream then goes on as if the host had no room
        return super().backup_node_for_write_back(node_id)

    def write_backup_storage(self, node_id: int) -> None:
        if not self.enable_storage:
            return
        node = self.tree_core.node_by_id(node_id)
        super().write_backup_storage(node_id)
        component = self.importance
        component.state.faults.learn(FaultPlace.TREE_EVENT, component.node_events.handed_to_storage, node)

    def _finish_write_through_ack(self, ack_id: int) -> None:
        copy = buffered_copy(self, ack_id)
        super()._finish_write_through_ack(ack_id)
        if copy is not None:
            component = self.importance
            learn = component.state.faults.learn
            learn(FaultPlace.TREE_EVENT, component.node_events.copy_handed_to_storage, copy)

    def _drain_storage_control_queues_impl(  # type: ignore[override]  # upstream names every argument
        self, *, n_backup: int | None, **counts: Any
    ) -> None:
        component = self.importance
        writes = ended_writes(self, n_backup, component.state.ranks)
        super()._drain_storage_control_queues_impl(n_backup=n_backup, **counts)
        for write in writes:
            component.state.faults.learn(FaultPlace.TREE_EVENT, component.node_events.storage_ended, write)

    def clear_storage_backend(self) -> bool:
        is_clear: bool = super().clear_storage_backend()
        if is_clear:
            self._storage_emptied()
        return is_clear

    def detach_storage_backend(self) -> tuple[bool, str]:
        done: tuple[bool, str] = super().detach_storage_backend()
        if done[0]:
            self._storage_emptied()
        return done

    def _storage_emptied(self) -> None:
        component = self.importance
        component.state.faults.learn(FaultPlace.TREE_EVENT, component.node_events.storage_emptied)

    def _handle_prefetch_result(self, operation: PrefetchOperation) -> None:
        super()._handle_prefetch_result(operation)
        self.importance.prefetched(operation.handle.rid)

    def sanity_check(self) -> None:
        super().sanity_check()  # type: ignore[no-untyped-call]  # upstream's has no annotations
        self.importance.check_integrity()


def tiered_pool(cache: ImportanceRadixCache) -> TieredKVPool | None:
    """The pool; None where it is another."""
    if not cache.importance.state.options.is_tiered:
        return None
    pool = cache.token_to_kv_pool_allocator.get_kvcache()
    return cast("TieredKVPool", pool)

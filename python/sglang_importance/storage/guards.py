"""Keeps a fault in one of HiCache's storage threads from reaching a request.

Upstream's threads end at the first exception, and a request that waits for one of them waits for ever
(managers/cache_controller.py, ``prefetch_io_aux_func`` and its neighbours). Two lines of defence: a step that
raises counts as one that found nothing, and a thread whose loop raises nevertheless goes on, while the
requests that had been waiting until then stop waiting and are computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.cache_controller import PrefetchAck

from sglang_importance.storage.store_metrics import publish_now
from sglang_importance.storage.weights import WATCH
from sglang_importance.upstream.hooks import Hook, HookType

logger = logging.getLogger(__name__)

_HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

_last_lost = float("-inf")


def _fault(thread: str, error: BaseException) -> None:
    logger.error("KV importance store: %s thread: %s: %s", thread, type(error).__name__, error)
    WATCH.counters.add("thread_faults", thread)
    publish_now(WATCH.counters)


def _contained(thread: str, otherwise: Callable[[], Any]) -> Callable[..., Any]:
    """A hook around one step of a thread: what it raises is counted, and the step found nothing."""

    def around(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except BaseException as error:  # SystemExit ends a thread as surely
            _fault(thread, error)
            return otherwise()

    return around


def _supervised(thread: str) -> Callable[..., None]:
    """A hook around a thread's whole loop: it starts again until the controller stops it."""

    def around(loop: Callable[..., None], controller: Any) -> None:
        global _last_lost
        while True:
            try:
                return loop(controller)
            except BaseException as error:
                _last_lost = time.monotonic()
                _fault(thread, error)
                if controller.storage_stop_event.is_set():
                    return None

    return around


_contain_query = _contained("prefetch", lambda: ([], 0))
_contain_transfer = _contained("prefetch_io", lambda: None)
_supervise_transfers = _supervised("prefetch_io")
_contain_backup = _contained("backup", lambda: None)
_supervise_backup = _supervised("backup")


def _around_hit_query(
    query: Callable[..., tuple[list[str], int]], controller: Any, operation: Any, *args: Any, **kwargs: Any
) -> tuple[list[str], int]:
    """Below tiered pages, fetches no more than the staging buffer holds.

    Upstream would wait for ever for room (unified_radix_cache.py, ``_try_alloc_storage_hit``).
    """
    hashes, tokens = _contain_query(query, controller, operation, *args, **kwargs)
    if controller.host_memory_mode != "buffer_only":
        return hashes, tokens
    pages = min(tokens, controller.prefetch_capacity_limit) // controller.page_size
    return hashes[:pages], pages * controller.page_size


def _around_page_transfer(transfer: Callable[..., None], controller: Any, operation: Any) -> None:
    controller._kv_importance_prefetch = operation
    _contain_transfer(transfer, controller, operation)


def _around_prefetch_io_loop(loop: Callable[..., None], controller: Any) -> None:
    def go_on(controller: Any) -> None:
        # Only the last acknowledgement of a prefetch gives back the host pages that nothing was read into.
        operation = controller._kv_importance_prefetch
        if operation is not None:
            controller._kv_importance_prefetch = None
            last = PrefetchAck(rid=operation.request_id, completed_req=True, operation=operation)
            controller.prefetch_sync_queue.put(last)
        loop(controller)

    controller._kv_importance_prefetch = None
    _supervise_transfers(go_on, controller)


def _around_page_backup(backup: Callable[..., None], controller: Any, operation: Any) -> None:
    controller._kv_importance_backup = operation
    _contain_backup(backup, controller, operation)


def _around_backup_loop(loop: Callable[..., None], controller: Any) -> None:
    def go_on(controller: Any) -> None:
        # A write that is never acknowledged keeps its pages locked, and the cache from being flushed; that
        # the scheduler gets the acknowledgement of one twice does no harm.
        operation = getattr(controller, "_kv_importance_backup", None)
        if operation is not None:
            controller._kv_importance_backup = None
            controller.ack_backup_queue.put(operation)
        loop(controller)

    controller._kv_importance_backup = None
    _supervise_backup(go_on, controller)


def _around_reduce_ack(reduce: Callable[..., None], controller: Any, ack: Any) -> None:
    """Ranks agree on the pages of a prefetch; where that fails, on no more than before."""
    operation = ack.operation
    if ack.completed_req:
        if getattr(operation, "_kv_importance_completed", False):
            ack.completed_req = None  # sent twice by a thread that started again: pages are freed once
            return
        operation._kv_importance_completed = True
    try:
        reduce(controller, ack)
    except BaseException as error:
        _fault("prefetch_sync", error)
        if ack.completed_tokens is not None:
            ack.completed_tokens = getattr(operation, "_kv_importance_agreed", 0)
        if ack.pool_hits is not None:
            ack.pool_hits = {}
    if ack.completed_tokens is not None:
        operation._kv_importance_agreed = ack.completed_tokens


def _around_can_terminate_prefetch(can_terminate: Callable[..., bool], cache: Any, operation: Any) -> bool:
    if can_terminate(cache, operation):
        return True
    if cache.prefetch_stop_policy != "wait_complete":
        return False  # upstream's own clock ends the wait
    lost = torch.tensor(int(operation.start_time <= _last_lost), dtype=torch.int)
    cache._all_reduce(lost, torch.distributed.ReduceOp.MAX)
    if not lost.item():
        return False
    WATCH.counters.add("overdue_prefetches")
    publish_now(WATCH.counters)
    return True


def _around_weight_change(change: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    WATCH.changing()
    # What raises here may do so on one rank, and ends the server: the others are not asked for their weights.
    result = change(manager, *args, **kwargs)
    if getattr(manager, "_session", None) is None:  # else more is to come; the same on all ranks
        WATCH.changed()
        publish_now(WATCH.counters)
    return result


def _after_cache_reset(result: None, cache: Any) -> None:
    WATCH.cache_was_reset()


WEIGHT_HOOKS: dict[str, Hook] = {
    **{
        f"{_UPDATER}.{method}": (_around_weight_change, HookType.AROUND)
        for method in (
            "begin_weight_update",
            "end_weight_update",
            "update_weights_from_disk",
            "update_weights_from_distributed",
            "update_weights_from_tensor",
            "update_weights_from_ipc",
        )
    },
    f"{_SCHEDULER}.handle_update_weight_version": (_around_weight_change, HookType.AROUND),
}

# All on the class in use: what it overrides, a hook on its base would miss.
HOOKS: dict[str, Hook] = {
    f"{_HYBRID}._storage_hit_query": (_around_hit_query, HookType.AROUND),
    f"{_HYBRID}._page_transfer_kv_batch": (_contained("prefetch_io", lambda: 0), HookType.AROUND),
    f"{_HYBRID}._page_transfer": (_around_page_transfer, HookType.AROUND),
    f"{_HYBRID}._page_backup": (_around_page_backup, HookType.AROUND),
    f"{_HYBRID}.prefetch_thread_func": (_supervised("prefetch"), HookType.AROUND),
    f"{_HYBRID}.prefetch_io_aux_func": (_around_prefetch_io_loop, HookType.AROUND),
    f"{_HYBRID}.prefetch_sync_thread_func": (_supervised("prefetch_sync"), HookType.AROUND),
    f"{_HYBRID}.backup_thread_func": (_around_backup_loop, HookType.AROUND),
    f"{_HYBRID}._reduce_prefetch_ack": (_around_reduce_ack, HookType.AROUND),
    f"{_CACHE}._can_terminate_prefetch": (_around_can_terminate_prefetch, HookType.AROUND),
    f"{_CACHE}.reset": (_after_cache_reset, HookType.AFTER),
    **WEIGHT_HOOKS,
}

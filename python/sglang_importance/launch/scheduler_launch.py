"""The scheduler's side of a launch under ``observe`` or ``importance``, or with a store."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

from sglang_importance.attention.score_sources import NONE
from sglang_importance.launch.installers import install_before_scheduler, install_on_scheduler
from sglang_importance.launch.launcher import PROOF_KEY, end_controller, leave_proof
from sglang_importance.storage import store_launch
from sglang_importance.upstream.hooks import Hook, HookType, dead_hooks
from sglang_importance.upstream.refusal import SCHEDULER_REFUSED_EXIT_CODE, LaunchRefused, cure, report
from sglang_importance.upstream.server_options import importance_options, store_options

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


CONSTRUCTION_TARGET = "sglang.srt.managers.scheduler.Scheduler.__init__"
REPORT_TARGET = "sglang.srt.managers.scheduler.Scheduler.get_init_info"


def _around_construction(
    construct: Callable[..., None], scheduler: Scheduler, server_args: Any, *args: Any, **kwargs: Any
) -> None:
    options, store = importance_options(server_args), store_options(server_args)
    if options is None and store is None:
        construct(scheduler, server_args, *args, **kwargs)
        return
    try:
        if options is not None:
            install_before_scheduler(options)
        if store is not None:
            store_launch.install_before_scheduler()
        construct(scheduler, server_args, *args, **kwargs)
        if options is not None:
            install_on_scheduler(scheduler)
        if store is not None:
            store_launch.install_on_scheduler(scheduler)
        _prove(scheduler)
    except LaunchRefused as refused:
        report(refused)
        if server_args.dp_size > 1:
            end_controller()
        # Threads of a half-built scheduler would keep an ordinary exit waiting.
        os._exit(SCHEDULER_REFUSED_EXIT_CODE)


def _prove(scheduler: Scheduler) -> None:
    dead = [name for name, live in _live(scheduler).items() if not live]
    if dead:
        raise LaunchRefused([f"not live in the scheduler: {', '.join(dead)}; {cure()}"])


def _live(scheduler: Scheduler) -> dict[str, bool]:
    """Each part of ours that this scheduler needs, and whether it is in use; empty where sglang is stock."""
    live: dict[str, bool] = {}
    if importance_options(scheduler.server_args) is not None:
        live.update(live_hooks(scheduler))
    if store_options(scheduler.server_args) is not None:
        live.update(store_launch.live_store(scheduler))
    return live


def _after_get_init_info(info: dict[str, Any], scheduler: Scheduler) -> None:
    if live := _live(scheduler):
        info[PROOF_KEY] = live
        leave_proof(live)


HOOKS: dict[str, Hook] = {
    CONSTRUCTION_TARGET: (_around_construction, HookType.AROUND),
    REPORT_TARGET: (_after_get_init_info, HookType.AFTER),
}
"""Hooks of every scheduler process; both pass through where sglang is stock."""


def live_hooks(scheduler: Scheduler) -> dict[str, bool]:
    """Each part that a scheduler needs under ``observe`` and ``importance``, and whether it is in use.

    Raises nothing on a stock scheduler: there, all is False.
    """
    from sglang_importance.attention.source import softmax_backend
    from sglang_importance.cache.component import ImportanceComponent
    from sglang_importance.cache.importance_cache import ImportanceRadixCache
    from sglang_importance.operations.messages import KvImportanceReq
    from sglang_importance.tree.leaf_sets import WatchedLeaves

    cache = scheduler.tree_cache
    core = getattr(cache, "tree_core", None)
    component = getattr(cache, "components", {}).get(ComponentType.FULL)
    runner = scheduler.tp_worker.model_runner
    backend = softmax_backend(runner)
    options = importance_options(scheduler.server_args)
    tiered = options is not None and options.is_tiered
    takes_none = options is not None and options.source == NONE
    return {
        **({"page lists": hasattr(backend, "page_lists")} if options and options.trace.pages else {}),
        **({"tiered pages": hasattr(runner.token_to_kv_pool, "slots")} if tiered else {}),
        "radix cache": isinstance(cache, ImportanceRadixCache),
        "Python tree core": isinstance(core, UnifiedTreeCore),
        "tree component": isinstance(component, ImportanceComponent),
        "eviction order": isinstance(core, UnifiedTreeCore)
        and isinstance(core.evictable_device_leaves, WatchedLeaves)
        and isinstance(core.evictable_host_leaves, WatchedLeaves),
        "attention scores": takes_none or getattr(backend, "rows", None) is not None,
        "deferred work": isinstance(component, ImportanceComponent)
        and scheduler.process_batch_result is component.deferred_work.installed,
        "message handlers": KvImportanceReq in scheduler._request_dispatcher._mapping,
        "sglang hooks": not dead_hooks(),
    }

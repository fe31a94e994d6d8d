"""What of ours is live in a scheduler, looked up in the scheduler itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.plugins.hook_registry import HookRegistry

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

PACKAGE = __package__ or "sglang_importance"


def live_hooks(scheduler: Scheduler) -> dict[str, bool]:
    """Each part that a scheduler needs under ``observe`` and ``importance``, and whether it is in use.

    Raises nothing on a stock scheduler: there, all is False.
    """
    from sglang_importance.attention.rows import active_rows
    from sglang_importance.cache import ImportanceRadixCache
    from sglang_importance.component import ImportanceComponent
    from sglang_importance.control import KvImportanceReq
    from sglang_importance.leaf_sets import WatchedLeaves

    cache = scheduler.tree_cache
    core = getattr(cache, "tree_core", None)
    component = getattr(cache, "components", {}).get(ComponentType.FULL)
    backend = scheduler.tp_worker.model_runner.attn_backend
    rows = active_rows()
    return {
        "radix cache": isinstance(cache, ImportanceRadixCache),
        "Python tree core": isinstance(core, UnifiedTreeCore),
        "tree component": isinstance(component, ImportanceComponent),
        "eviction order": isinstance(getattr(core, "evictable_device_leaves", None), WatchedLeaves)
        and isinstance(core.evictable_host_leaves, WatchedLeaves),
        "attention scores": rows is not None and getattr(backend, "rows", None) is rows,
        "answers first": isinstance(component, ImportanceComponent)
        and scheduler.process_batch_result is component.after_answers.installed,
        "message handlers": KvImportanceReq in scheduler._request_dispatcher._mapping,
        "sglang hooks": not unapplied_hooks(),
    }


def unapplied_hooks() -> list[str]:
    """Targets of ours that sglang could not hook in this process; it only logs them."""
    return sorted(
        target
        for target, hooks in HookRegistry._hooks.items()
        if target not in HookRegistry._patched
        and any(hook.__module__.startswith(PACKAGE) for _, hook, _ in hooks)
    )

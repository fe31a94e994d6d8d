"""The parts of ours that are live in a scheduler, looked up in the scheduler itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

from sglang_importance.attention.score_sources import NONE
from sglang_importance.upstream.hooks import dead_hooks
from sglang_importance.upstream.server_options import importance_options

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


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

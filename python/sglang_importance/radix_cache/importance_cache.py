"""The radix cache that sglang builds under ``--kv-policy observe`` and ``importance``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sgl_importance.cost import CostModel
from sgl_importance.interface import Importance
from sgl_importance.options import ImportanceOptions, flag
from sgl_importance.policy.importance import ImportancePolicy
from sgl_importance.shadow.pair import ShadowPair
from sgl_importance.study.shuffle import ShuffledImportancePolicy
from sglang_importance.attention.rank_sums import share
from sglang_importance.attention.rows import active_rows
from sglang_importance.metrics.publisher import MetricsPublisher
from sglang_importance.observe.recorder import Recorder, activate
from sglang_importance.observe.shadowing import Shadowing
from sglang_importance.placement.gating import open_gate
from sglang_importance.placement.prewarm_request import is_prewarm
from sglang_importance.placement.spare import SparedCopies
from sglang_importance.radix_cache.component import ImportanceComponent
from sglang_importance.radix_cache.observer import ObserverComponent
from sglang_importance.tree.nominal_costs import cost_model
from sglang_importance.upstream.refusal import LaunchRefused

if TYPE_CHECKING:
    from sglang.srt.managers.cache_controller import PrefetchOperation
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

logger = logging.getLogger(__name__)

GHOSTS_PER_DEVICE_PAGE = 4  # long enough to see whether an evicted page comes back
MAX_GHOST_PAGES = 2**18  # about 70 MB of scheduler memory, also where a page is one token


class ImportanceRadixCache(UnifiedRadixCache):
    """Upstream's unified radix cache whose full-attention component carries importance."""

    @property
    def importance(self) -> ImportanceComponent:
        component = self.components[ComponentType.FULL]
        assert isinstance(component, ImportanceComponent)
        return component

    def get_importance(self, key: bytes) -> Importance | None:
        """As ``sgl_importance.interface.ImportanceSource``: for connectors in the scheduler's process."""
        return self.importance.tree.source.get_importance(key)

    def reset(self) -> None:
        super().reset()
        self.importance.watch_leaves()

    def write_backup_storage(self, node_id: int) -> None:
        if not self.enable_storage:
            return
        self.store_chain(self.importance.worth_storing(self.tree_core.node_by_id(node_id)))

    def store_chain(self, chain: Sequence[UnifiedTreeNode]) -> None:
        """Hands nodes with a host copy to the storage tier, ancestors first."""
        for node in chain:
            super().write_backup_storage(node.id)
            self.importance.stored(node)

    def _handle_prefetch_result(self, operation: PrefetchOperation) -> None:
        tree = self.importance.tree
        tree.warming = is_prewarm(operation.handle.rid)
        try:
            super()._handle_prefetch_result(operation)
        finally:
            tree.warming = False

    def sanity_check(self) -> None:
        super().sanity_check()
        self.importance.check_integrity()


def create_importance_cache(ctx: TreeCacheBuildContext) -> BasePrefixCache:
    """Factory for ``register_radix_cache_backend``: the unified cache, our component, the Python core."""
    options: ImportanceOptions = ctx.server_args._sgl_importance
    allocator = ctx.params.token_to_kv_pool_allocator
    device_pages = allocator.size // ctx.params.page_size
    policy = _create_policy(options, cost_model(ctx.model_config, allocator))
    share(active_rows(), ctx.params.tp_cache_group)
    recorder = _create_recorder(ctx, options, policy) if options.trace else None
    activate(recorder)
    ghost_pages = min(GHOSTS_PER_DEVICE_PAGE * device_pages, MAX_GHOST_PAGES)
    component: Callable[..., ImportanceComponent] = ImportanceComponent
    if options.policy == "observe":
        shadows = ShadowPair(device_pages, ctx.params.page_size, policy.cost, ghost_pages)
        component = partial(ObserverComponent, shadowing=Shadowing(shadows))
    ctx.params.component_registry_override = {
        **(ctx.params.component_registry_override or {}),
        ComponentType.FULL: partial(
            component,
            options=options,
            policy=policy,
            ghost_pages=ghost_pages,
            metrics=MetricsPublisher.create(enabled=ctx.params.enable_metrics),
            recorder=recorder,
        ),
    }
    cache = create_unified_radix_cache(ctx, cache_class=ImportanceRadixCache)
    if options.use_gate:
        cache.importance.gating = open_gate(cache, options)
    if options.policy == "importance":
        SparedCopies(cache.importance)
    logger.info("KV policy %s: page size %d, %s", options.policy, ctx.params.page_size, policy.cost)
    return cache


def _create_policy(options: ImportanceOptions, cost: CostModel) -> ImportancePolicy:
    if options.g == "shuffled":
        return ShuffledImportancePolicy(cost)
    return ImportancePolicy(cost, use_importance=options.use_importance)


def _create_recorder(
    ctx: TreeCacheBuildContext, options: ImportanceOptions, policy: ImportancePolicy
) -> Recorder:
    rows = active_rows()
    try:
        return Recorder(
            Path(options.trace),
            options,
            page_size=ctx.params.page_size,
            model=Path(ctx.server_args.model_path).name,
            layers=rows.layers if rows else (),
            device_tokens=ctx.params.token_to_kv_pool_allocator.size,
            cost=policy.cost,
        )
    except OSError as error:
        raise LaunchRefused(
            [
                f"cannot record in {options.trace} ({error.strerror}): "
                f"give {flag('trace')} a writable directory"
            ]
        ) from error

"""Builds the radix cache of a server, with all parts that follow its tree."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any, cast

from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sgl_importance.laboratory import load_control
from sgl_importance.metrics_table import FaultPlace
from sgl_importance.nodes.ghosts import ghost_pages_of
from sgl_importance.observe.shadow.shadow_pair import ShadowPair
from sgl_importance.observe.shadow.tiered_shadow import HostWrites
from sgl_importance.observe.trace import TraceError
from sgl_importance.observe.volatile.detector import VolatileBeginnings
from sgl_importance.options.importance_options import ImportanceOptions, name_of
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.policy.marginal_loss import ImportancePolicy
from sgl_importance.tiers import Tier
from sglang_importance.attention.page_lists import PageListProbe
from sglang_importance.attention.rank_sums import share
from sglang_importance.attention.rows import ScoreRows
from sglang_importance.attention.source import softmax_backend
from sglang_importance.cache.component import ImportanceComponent
from sglang_importance.cache.dense_prefix import DensePrefix
from sglang_importance.cache.importance_cache import ImportanceRadixCache, tiered_pool
from sglang_importance.cache.misses import Misses
from sglang_importance.cache.state_component import StateComponent
from sglang_importance.metrics.publisher import MetricsPublisher
from sglang_importance.observe.recorder import Recorder
from sglang_importance.observe.shadowing import Shadowing
from sglang_importance.placement.backup_filter import BackupFilter
from sglang_importance.placement.ledger_feed import describe_ledger
from sglang_importance.sparse.pool import TieredKVPool
from sglang_importance.storage.store_metrics import StorePublisher
from sglang_importance.tree.nominal_costs import cost_model
from sglang_importance.tree.occupancy import capacity_tokens, full_attention_allocator, occupancy
from sglang_importance.tree.ranks import Ranks
from sglang_importance.tree.state import TreeState
from sglang_importance.upstream.refusal import LaunchRefused, cannot_record
from sglang_importance.upstream.server_options import data_parallel_rank, importance_options

logger = logging.getLogger(__name__)


def emitted_rows(ctx: TreeCacheBuildContext) -> ScoreRows | None:
    """The rows that the attention backend of the loaded model fills; None where it emits no scores."""
    rows: ScoreRows | None = getattr(softmax_backend(ctx.tp_worker.model_runner), "rows", None)
    return rows


def listed_pages(ctx: TreeCacheBuildContext) -> PageListProbe | None:
    """What lists pages beside the attention backend of the loaded model; None where nothing does."""
    probe: PageListProbe | None = getattr(softmax_backend(ctx.tp_worker.model_runner), "page_lists", None)
    return probe


def create_importance_cache(ctx: TreeCacheBuildContext) -> ImportanceRadixCache:
    """Factory for ``register_radix_cache_backend``: the unified cache, our component, the Python core."""
    options = importance_options(ctx.server_args)
    assert options is not None, "sglang chose our cache without our options"
    allocator = ctx.params.token_to_kv_pool_allocator
    page_size = ctx.params.page_size
    device_pages = full_attention_allocator(allocator).size // page_size
    policy = create_policy(options, cost_model(ctx.model_config, allocator))
    ghost_pages = ghost_pages_of(device_pages)
    rows = emitted_rows(ctx)
    ranks = Ranks(ctx.params.tp_cache_group)
    share(rows, ctx.params.tp_cache_group)
    recorder = (
        create_recorder(ctx, options, policy, rows) if options.trace.directory and ranks.leads else None
    )
    if rows is not None and recorder is not None and recorder.wants_steps:
        rows.on_step = recorder.step

    def host_tokens() -> int:
        return capacity_tokens(cache).get(Tier.HOST, 0)

    shadowing = None
    if options.policy == "observe" and ranks.leads:
        flags = shadowed_flags(ctx.server_args)
        chunk = flags["chunked_prefill_size"]
        pair = ShadowPair(
            device_pages, page_size, policy.cost, ghost_pages, chunk_tokens=chunk if chunk > 0 else None
        )
        writes = HostWrites.of(flags["hicache_write_policy"])
        shadowing = Shadowing(pair, lambda: host_tokens() // page_size, writes)
    if recorder is not None:
        recorder.host_tokens = host_tokens
    state = TreeState.create(options, policy, page_size=page_size, ghost_pages=ghost_pages, ranks=ranks)
    if rows is not None:
        state.counters.emission_time = rows.time
    if recorder is not None and (lists := listed_pages(ctx)) is not None:
        lists.attach(recorder.page_lists, partial(state.faults.note, FaultPlace.RECORDING))
    misses = Misses.create(state, device_pages=device_pages, ahead=int(ctx.params.is_eagle))
    publisher = MetricsPublisher.create(enabled=ctx.params.enable_metrics and ranks.leads)
    if misses is not None:
        if publisher is not None:
            misses.on_counted = partial(publisher.publish_misses, state.counters)
        misses.work_in_background()
    # A server without a store shows that nothing is stored.
    StorePublisher.create(enabled=ctx.params.enable_metrics)

    def publish() -> None:
        assert publisher is not None
        if (ledger := describe_ledger(cache.importance.ledger, state)) is not None:
            state.counters.ledger_lost_visits = ledger["lost_visits"]
        publisher.publish(state.counters, gauge_values(cache))

    follow_tree(
        ctx.params,
        state,
        rows=rows,
        recorder=recorder,
        shadowing=shadowing,
        publish=None if publisher is None else publish,
        dense_prefix=dense_prefix(allocator),
        misses=misses,
    )
    cache = cast(ImportanceRadixCache, create_unified_radix_cache(ctx, cache_class=ImportanceRadixCache))
    arguments: Any = ctx.server_args  # sglang puts its fields together at import
    cache.importance.requests.admissions.is_decode_server = arguments.disaggregation_mode == "decode"
    if ranks.leads:
        cache.importance.requests.beginnings = VolatileBeginnings()
    if options.policy == "importance":
        cache.importance.backups = BackupFilter(state, cache.python_core)
    logger.info("KV importance: KV policy %s: page size %d, %s", options.policy, page_size, policy.cost)
    return cache


def dense_prefix(allocator: BaseTokenToKVPoolAllocator) -> DensePrefix | None:
    """What keeps the tree exact where steps read chosen pages."""
    pool = allocator.get_kvcache()
    selections = pool.selections if isinstance(pool, TieredKVPool) else None
    return None if selections is None else DensePrefix(selections)


def follow_tree(params: CacheInitParams, state: TreeState, **parts: Any) -> None:
    """Makes a cache built of ``params`` create our components, which follow the tree for ``state``.

    Args:
        parts: further arguments of ``ImportanceComponent``.
    """
    params.component_registry_override = {
        **(params.component_registry_override or {}),
        # sglang only calls what is registered, as it would call the class.
        ComponentType.FULL: partial(ImportanceComponent, state=state, **parts),  # type: ignore[dict-item]
        ComponentType.MAMBA: partial(StateComponent, state=state),  # type: ignore[dict-item]
    }


def create_policy(options: ImportanceOptions, cost: CostModel) -> ImportancePolicy:
    """The policy that the operator chose, g on or off, or a control arm in place of both."""
    if options.signal.g == "shuffled":
        control: ImportancePolicy = load_control(options.signal.g)(cost)
        return control
    return ImportancePolicy(cost, use_importance=options.use_importance)


def shadowed_flags(server_args: Any) -> dict[str, Any]:
    """Flags of sglang's that a shadow cache goes by, by name: of a server's own, or behind its recording."""
    return {
        "chunked_prefill_size": getattr(server_args, "chunked_prefill_size", None) or -1,
        "hicache_write_policy": getattr(server_args, "hicache_write_policy", None),
    }


def create_recorder(
    ctx: TreeCacheBuildContext, options: ImportanceOptions, policy: ImportancePolicy, rows: ScoreRows | None
) -> Recorder:
    """The recorder that ``--kv-importance-trace`` asks for.

    Raises:
        LaunchRefused: the directory cannot be written, or has a recording that this one cannot go on.
    """
    arguments: Any = ctx.server_args  # sglang puts its fields together at import
    folder = Path(options.trace.directory).expanduser()
    if arguments.dp_size > 1:  # each tree is a recording of its own
        folder /= f"dp{data_parallel_rank()}"
    try:
        return Recorder(
            folder,
            options,
            page_size=ctx.params.page_size,
            model=Path(arguments.model_path).name,
            layers=rows.layers if rows else (),
            device_tokens=full_attention_allocator(ctx.params.token_to_kv_pool_allocator).size,
            cost=policy.cost,
            flags=shadowed_flags(arguments),
        )
    except TraceError as error:
        raise LaunchRefused([f"{name_of('trace.directory')}: {error}"]) from error
    except OSError as error:
        raise cannot_record(options.trace.directory, error) from error


def gauge_values(cache: ImportanceRadixCache) -> dict[str, dict[Any, float]]:
    """The value of every gauge of the scheduler: by name, then by label value."""
    component = cache.importance
    tiers, budgets = occupancy(cache), component.pins.budgets()
    pool = tiered_pool(cache)
    return {
        "size_tokens": {tier: each.total for tier, each in tiers.items()},
        "used_tokens": {tier: each.used for tier, each in tiers.items()},
        "pages_resident": {(): 0.0 if pool is None else float(pool.slots.resident_pages().sum())},
        "resident_tokens_by_idle_seconds": {**component.state.counters.ages.resident_tokens},
        "nodes": {(): len(component.body_mass)},
        "body_mass": {(): component.body_mass.total},
        "pins": {(): len(component.pins.table)},
        "pinned_tokens": {tier: granted for tier, (granted, _) in budgets.items()},
        "pin_budget_tokens": {tier: budget for tier, (_, budget) in budgets.items()},
        "fallback": {(): float(not component.state.faults.is_learning)},
    }

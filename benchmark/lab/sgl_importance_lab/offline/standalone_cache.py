"""A radix cache without a server: the real tree on real allocators, for tests and benchmarks."""

from __future__ import annotations

from typing import Literal

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.policy.marginal_loss import ImportancePolicy
from sglang_importance.attention.rows import ScoreRows
from sglang_importance.cache.cache_factory import follow_tree
from sglang_importance.cache.importance_cache import ImportanceRadixCache
from sglang_importance.cache.misses import Misses
from sglang_importance.observe.recorder import Recorder
from sglang_importance.tree.state import TreeState

CacheKind = Literal[
    "rust-lru", "python-lru", "python-slru", "python-tlru", "python-lfu", "observe", "importance"
]

_COST = CostModel(
    prefill_seconds_per_token=1e-5,
    prefill_seconds_per_token_pair=1e-9,
    bytes_per_token=131_072,
    host_bytes_per_second=4e10,
    storage_bytes_per_second=3e9,
)


def _cache_init_params(
    *,
    tokens: int,
    page_size: int,
    requests: int,
    max_context: int,
    state_requests: HybridReqToTokenPool | None,
) -> CacheInitParams:
    pool = MHATokenToKVPool(
        size=tokens,
        page_size=page_size,
        dtype=torch.float32,
        head_num=1,
        head_dim=1,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
        enable_alt_stream=False,
    )
    allocator = (
        TokenToKVPoolAllocator(tokens, torch.float32, "cpu", pool, need_sort=False)
        if page_size == 1
        else PagedTokenToKVPoolAllocator(tokens, page_size, torch.float32, "cpu", pool, need_sort=False)
    )
    if state_requests is not None:
        return CacheInitParams(
            disable=False,
            req_to_token_pool=state_requests,
            token_to_kv_pool_allocator=allocator,
            page_size=page_size,
            tree_components=(ComponentType.FULL, ComponentType.MAMBA),
            enable_mamba_extra_buffer=state_requests.enable_mamba_extra_buffer,
        )
    return CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(requests, max_context, "cpu", enable_memory_saver=False),
        token_to_kv_pool_allocator=allocator,
        page_size=page_size,
        tree_components=(ComponentType.FULL,),
    )


def build_cache(
    kind: CacheKind,
    *,
    tokens: int,
    page_size: int = 1,
    requests: int = 32,
    max_context: int = 4096,
    options: ImportanceOptions | None = None,
    rows: ScoreRows | None = None,
    recorder: Recorder | None = None,
    policy: ImportancePolicy | None = None,
    eviction_config: dict[str, int] | None = None,
    state_requests: HybridReqToTokenPool | None = None,
) -> UnifiedRadixCache:
    """A cache over a device pool of ``tokens`` tokens, without host or storage tier.

    Args:
        kind: one of stock's policies on a tree core, or ours.
        tokens: size of the device pool.
        page_size: tokens per page.
        requests: rows of the request pool.
        max_context: tokens per row.
        options: for ours; a default set where None.
        rows: for ours, where page scores are left; None folds nothing.
        recorder: for ours; None records nothing.
        policy: for ours; one with constants of a data-centre GPU where None.
        eviction_config: parameters of stock's policy; T-LRU is LRU without.
        state_requests: the request pool with the states of linear attention, in place of ``requests`` rows of
            ``max_context`` tokens; None for a model without.
    """
    params = _cache_init_params(
        tokens=tokens,
        page_size=page_size,
        requests=requests,
        max_context=max_context,
        state_requests=state_requests,
    )
    if kind not in ("observe", "importance"):
        params.tree_core_backend, params.eviction_policy = kind.split("-")
        params.eviction_policy_config = eviction_config
        return UnifiedRadixCache(params)
    options = options or ImportanceOptions(policy=kind)
    policy = policy or ImportancePolicy(_COST, use_importance=options.use_importance)
    state = TreeState.create(options, policy, page_size=page_size, ghost_pages=4 * tokens // page_size)
    misses = Misses.create(state, device_pages=tokens // page_size)
    follow_tree(params, state, rows=rows, recorder=recorder, misses=misses)
    return ImportanceRadixCache(params)

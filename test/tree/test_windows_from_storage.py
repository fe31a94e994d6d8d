"""Storage brings KV of a model whose sliding windows have a pool of their own, into sglang's real tree."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import CacheTransferPhase, ComponentType

from sgl_importance.observe.trace.records import EventKind
from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.policy.marginal_loss import ImportancePolicy
from sgl_importance.tiers import Tier
from sglang_importance.cache.cache_factory import follow_tree
from sglang_importance.cache.importance_cache import ImportanceRadixCache
from sglang_importance.scheduler.chunk_room import HOOKS
from sglang_importance.tree.state import TreeState

from support.doubles.lower_tiers import LowerTiers
from support.window_pool import windows_allocator

PAGE = 4
WINDOW = 16
TOKENS = 256


def windowed_cache(kind: str, *, window_tokens: int = TOKENS) -> ImportanceRadixCache:
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(4, TOKENS, "cpu", enable_memory_saver=False),
        token_to_kv_pool_allocator=windows_allocator(TOKENS, window_tokens, PAGE),
        page_size=PAGE,
        tree_components=(ComponentType.FULL, ComponentType.SWA),
        sliding_window_size=WINDOW,
    )
    cost = CostModel(
        prefill_seconds_per_token=1e-5,
        prefill_seconds_per_token_pair=1e-9,
        bytes_per_token=1024,
        host_bytes_per_second=4e10,
        storage_bytes_per_second=3e9,
    )
    options = ImportanceOptions(policy=kind)
    follow_tree(
        params, TreeState.create(options, ImportancePolicy(cost), page_size=PAGE, ghost_pages=TOKENS // PAGE)
    )
    cache = ImportanceRadixCache(params)
    cache.tree_core.set_hicache_enabled()
    cache.tree_core.has_swa_host_pool = True
    return cache


def bring(cache: ImportanceRadixCache, tokens: int) -> None:
    """What the cache does with a prefetch that is done: a text from its beginning, and its last window."""
    core = cache.tree_core
    root = core.root_node.id
    hashes = [str(page) for page in range(tokens // PAGE)]
    found = core.insert_host(root, RadixKey(array("q", range(tokens)), None), torch.arange(tokens), hashes)
    core.commit_hicache_transfers(
        root,
        CacheTransferPhase.PREFETCH,
        {ComponentType.SWA: [PoolTransfer(name=PoolName.SWA, host_indices=torch.arange(WINDOW))]},
        cache_actions=[],
        insert_result=found,
        pool_storage_result=SimpleNamespace(extra_pool_hit_pages={PoolName.SWA: WINDOW // PAGE}),
    )
    cache.importance.prefetched("a request")


@pytest.mark.parametrize("kind", ["importance", "observe"])
@pytest.mark.parametrize(("tokens", "nodes"), [(WINDOW, [(0, WINDOW)]), (40, [(0, 24), (24, WINDOW)])])
def test_what_storage_brings_is_known_and_can_be_evicted(
    kind: str, tokens: int, nodes: list[tuple[int, int]]
) -> None:
    cache = windowed_cache(kind)
    bring(cache, tokens)
    state = cache.importance.state
    assert state.faults.describe() == {"counts": {}, "fallback": None}
    known = [state.tree.metadata(node) for node in state.tree.nodes()]
    assert [(each.depth, each.tokens) for each in known] == nodes
    assert all(each.in_storage for each in known)
    events = [event for _, event in state.events.since(0, 9) if event.kind is EventKind.LOAD_BACK]
    assert [event.tokens for event in events] == [length for _, length in nodes]
    cache.sanity_check()

    result = cache.tree_core.drive_host_eviction(ComponentType.FULL, tokens)
    cache._free_values(result.device_frees, result.host_frees)
    assert result.tracker[ComponentType.FULL] == tokens
    assert state.counters.demoted_tokens[Tier.HOST] == tokens
    assert not list(state.tree.nodes())
    assert state.faults.is_learning
    cache.sanity_check()


def test_what_is_loaded_back_takes_only_a_window_of_the_smaller_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt was let in never, and nobody behind it."""
    cache = windowed_cache("importance", window_tokens=4 * WINDOW)
    LowerTiers.attach(cache, host_tokens=TOKENS, write_policy="write_back")
    bring(cache, tokens := 8 * WINDOW)
    match = cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", range(tokens)), None)))
    on_host = {"host_hit_length": match.host_hit_length, "swa_host_hit_length": match.swa_host_hit_length}
    assert on_host == {"host_hit_length": tokens, "swa_host_hit_length": WINDOW}
    walks: list[EvictParams] = []
    monkeypatch.setattr(cache, "evict_for_alloc", walks.append)
    budget = cache.token_to_kv_pool_allocator.create_prefill_budget(cache)
    adder = SimpleNamespace(memory_budget=budget, tree_cache=cache, per_req_token_overhead=PAGE)
    request = SimpleNamespace(rid="new", best_match_node=match.best_match_node)
    (hook,) = (hook for name, (hook, _) in HOOKS.items() if name.endswith("_select_prefill_admission"))

    def is_let_in(computed: int) -> bool:
        admission = SimpleNamespace(extend_len=computed)
        return hook(lambda *_, **__: admission, adder, request, **on_host) is admission

    assert is_let_in(3 * WINDOW - PAGE)
    assert not walks
    assert not is_let_in(3 * WINDOW)
    assert [(each.num_tokens, each.swa_num_tokens) for each in walks] == [(0, PAGE)]


def test_an_eviction_that_fell_short_in_one_pool_hinders_none_from_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = windowed_cache("importance", window_tokens=4 * WINDOW)
    LowerTiers.attach(cache, host_tokens=TOKENS, write_policy="write_back")
    walks: list[EvictParams] = []
    monkeypatch.setattr(cache, "evict_for_alloc", walks.append)
    assert not any(cache.can_free(5 * WINDOW) for _ in range(3))
    assert not any(cache.can_free(WINDOW, loaded_back=TOKENS) for _ in range(3))
    assert [(each.num_tokens, each.swa_num_tokens) for each in walks] == [(0, WINDOW), (WINDOW, 0)]

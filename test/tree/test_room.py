"""Room that counts as evictable while an eviction cannot return it, on the real tree; stock's has it, too."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_importance.scheduler.chunk_room import HOOKS

from support.doubles.lower_tiers import LowerTiers
from support.drivers.tree_driver import PAGE, TreeDriver
from support.drivers.tree_requests import prompt, serve

POOL, BEGINNING, END, HOST = 16 * PAGE, 6 * PAGE, 4 * PAGE, 7 * PAGE


def stuck(kind: str = "importance", *, storage: bool = True) -> tuple[TreeDriver, LowerTiers]:
    """A node's end is on the host, being written to storage; its beginning finds no room there."""
    driver = TreeDriver(kind, tokens=POOL)
    tiers = LowerTiers.attach(driver.cache, host_tokens=HOST, write_policy="write_back", storage=storage)
    serve(driver, prompt(0, BEGINNING // PAGE))
    serve(driver, prompt(0, BEGINNING // PAGE) + prompt(500, END // PAGE))
    assert driver.evict(1) == END
    return driver, tiers


def free(driver: TreeDriver) -> int:
    return int(driver.cache.token_to_kv_pool_allocator.available_size())


def hooked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    (hook,) = (hook for path, (hook, _) in HOOKS.items() if path.endswith(f".{name}"))
    return lambda *args, **kwargs: hook(function, *args, **kwargs)


def admitted(driver: TreeDriver, tokens: int, match: MatchResult | None = None) -> bool:
    """Whether a request that computes so many tokens is let in, which upstream's budget would."""
    budget = driver.cache.token_to_kv_pool_allocator.create_prefill_budget(driver.cache)
    assert tokens < budget.remaining_total
    adder = SimpleNamespace(memory_budget=budget, tree_cache=driver.cache, per_req_token_overhead=PAGE)
    request = SimpleNamespace(rid="new", best_match_node=None if match is None else match.best_match_node)
    select = hooked("_select_prefill_admission", lambda *_, **__: SimpleNamespace(extend_len=tokens))
    on_host = 0 if match is None else match.host_hit_length
    selected = select(adder, request, host_hit_length=on_host, swa_host_hit_length=0)
    return selected is not AddReqResult.NO_TOKEN


def chunk(driver: TreeDriver, tokens: int) -> int | None:
    budget = driver.cache.token_to_kv_pool_allocator.create_prefill_budget(driver.cache)
    return hooked("available_chunk_tokens", PrefillBudget.available_chunk_tokens)(budget, tokens)


@pytest.mark.parametrize("kind", ["python-lru", "importance"])
def test_an_eviction_returns_less_than_counts(kind: str) -> None:
    driver, tiers = stuck(kind)
    assert driver.cache.evictable_size() == BEGINNING
    assert driver.evict(1) == 0
    assert driver.cache.evictable_size() == BEGINNING
    tiers.settle(driver.cache)
    assert driver.evict(1) == BEGINNING


def test_who_finds_no_room_waits_until_storage_has_written() -> None:
    driver, tiers = stuck()
    assert free(driver) == POOL - BEGINNING
    assert admitted(driver, POOL - BEGINNING - PAGE)
    assert not admitted(driver, POOL - BEGINNING)
    assert chunk(driver, POOL) == POOL - BEGINNING
    taken = driver.cache.token_to_kv_pool_allocator.alloc(POOL - BEGINNING)
    assert chunk(driver, PAGE) is None
    tiers.settle(driver.cache)
    assert chunk(driver, PAGE) == PAGE
    assert free(driver) == BEGINNING
    driver.cache.token_to_kv_pool_allocator.free(taken)
    assert admitted(driver, POOL - 2 * PAGE)
    driver.cache.sanity_check()


def test_nothing_is_evicted_again_before_something_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, tiers = stuck()
    walks: list[int] = []
    evict = driver.cache.evict_for_alloc
    monkeypatch.setattr(driver.cache, "evict_for_alloc", lambda params: walks.append(1) or evict(params))
    assert not any(admitted(driver, POOL - BEGINNING) for _ in range(5))
    assert len(walks) == 1
    tiers.settle(driver.cache)
    assert admitted(driver, POOL - BEGINNING)
    assert len(walks) == 2


def test_without_storage_nothing_is_evicted_ahead() -> None:
    driver, _ = stuck(storage=False)
    assert admitted(driver, POOL - BEGINNING)
    assert driver.cache.evictable_size() == BEGINNING
    assert driver.evict(1) == BEGINNING


def test_what_a_request_found_on_the_host_stays_there() -> None:
    driver, tiers = stuck()
    tiers.settle(driver.cache)
    paths = [prompt(0, BEGINNING // PAGE) + prompt(500, END // PAGE), prompt(900, 9)]
    serve(driver, paths[1])
    keys = [RadixKey(array("q", path)) for path in paths]
    match = driver.cache.match_prefix(MatchPrefixParams(key=keys[0]))
    assert match.host_hit_length == END
    driver.cache.inc_lock_ref(match.last_device_node)
    assert admitted(driver, 4 * PAGE, match)  # for which the other goes, of which the host has no room
    found = [driver.cache.match_prefix(MatchPrefixParams(key=key)).host_hit_length for key in keys]
    assert found == [END, 0]
    driver.cache.sanity_check()

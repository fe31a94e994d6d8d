"""Prompts that storage has: each is asked for once, by the request that storage brings them for."""

from __future__ import annotations

from array import array

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from support.drivers.tree_driver import PAGE, TreeDriver
from support.drivers.tree_requests import path_of, prompt, serve


def to_host(driver: TreeDriver, tokens: list[int], rid: str) -> None:
    """A prefetch that is done, where there is a host tier."""
    hashes = [str(page) for page in range(len(tokens) // PAGE)]
    key = RadixKey(array("q", tokens), None)
    driver.core.insert_host(driver.core.root_node.id, key, torch.arange(len(tokens)), hashes)
    driver.component.prefetched(rid)


def to_device(driver: TreeDriver, tokens: list[int], rid: str) -> None:
    """The same in buffer mode: storage is loaded to the device at once."""
    slots = driver.cache.token_to_kv_pool_allocator.alloc(len(tokens))
    with driver.component.bringing_from_storage(rid):
        driver.cache.insert(InsertParams(key=RadixKey(array("q", tokens), None), value=slots))


@pytest.mark.parametrize("bring", [to_host, to_device])
def test_a_prompt_that_is_asked_for_once_is_no_reuse(bring) -> None:
    driver = TreeDriver(tokens=4096)
    for number in range(60):
        tokens = prompt(1000 * number, 4)
        bring(driver, tokens, str(number))
        serve(driver, [*tokens, 1])
    state = driver.component.state
    assert state.policy.reuse.counts()[0].sum() == 0
    waiting = state.counters.calibration._pending
    assert waiting
    assert not any(prediction.came_true for prediction in waiting)
    known = [metadata for number in range(60) for _, metadata in path_of(driver, prompt(1000 * number, 4))]
    assert {metadata.at_risk_as for metadata in known} == {metadata.reuse_class for metadata in known}
    driver.component.check_integrity()


@pytest.mark.parametrize("bring", [to_host, to_device])
def test_what_was_evicted_is_one_reuse_at_its_age(bring) -> None:
    """Two nodes, which come back as one."""
    driver = TreeDriver()
    first, whole = prompt(0, 2), prompt(0, 4)
    serve(driver, first)
    serve(driver, whole)
    reuse = driver.component.state.policy.reuse
    before = reuse.counts()[0].sum(axis=0)
    driver.evict(10**6)
    for number in range(1, 6):
        serve(driver, prompt(1000 * number, 1))
    bring(driver, whole, "back")
    serve(driver, [*whole, 1])
    gained = reuse.counts()[0].sum(axis=0) - before
    assert gained.sum() == 2, "one for each node that was evicted"
    assert not gained[:2].any(), "they were away for five requests"
    ((_, metadata),) = path_of(driver, whole)
    assert (metadata.accesses, metadata.span) == (2, 7)
    driver.component.check_integrity()

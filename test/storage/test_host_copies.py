"""Weights that change while only the host holds pages: they are of the old weights, like any other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_importance.storage.weights import _nothing_is_cached

from support.drivers.hosted_driver import HostedDriver
from support.drivers.tree_driver import TreeDriver

TOKENS = list(range(1, 133))


@pytest.fixture
def driver() -> HostedDriver:
    return HostedDriver(write_policy="write_through")


def nothing_is_cached(driver: TreeDriver) -> bool:
    scheduler = SimpleNamespace(tree_cache=driver.cache, is_fully_idle=lambda ignore_waiting: True)
    return _nothing_is_cached(scheduler)  # type: ignore[arg-type]  # what it asks for


def test_pages_on_the_host_alone_are_cached(driver: HostedDriver) -> None:
    assert nothing_is_cached(driver)
    request = driver.admit(TOKENS)
    driver.prefill(request)
    driver.finish(request)
    driver.settle()
    assert not nothing_is_cached(driver)
    driver.evict(len(TOKENS))
    driver.settle()
    assert driver.cache.total_size() == (0, 0)
    assert not nothing_is_cached(driver)
    driver.evict_host(len(TOKENS))
    assert nothing_is_cached(driver)


def test_what_was_fetched_for_a_request_that_waits_is_cached(driver: HostedDriver) -> None:
    fetched = driver.host_pool.alloc(driver.cache.page_size)
    assert not nothing_is_cached(driver)
    driver.host_pool.free(fetched)
    assert nothing_is_cached(driver)


def test_a_server_without_a_host_tier_looks_at_its_device() -> None:
    driver = TreeDriver("importance")
    assert nothing_is_cached(driver)
    request = driver.admit(TOKENS)
    driver.prefill(request)
    driver.finish(request)
    assert not nothing_is_cached(driver)

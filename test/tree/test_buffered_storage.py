"""Copies that go to storage through a buffer: their nodes may be cut or evicted before they arrive."""

from __future__ import annotations

import pytest

from sgl_importance.misses.reason import Reason
from sgl_importance.tiers import Tier

from support.doubles.lower_tiers import LowerTiers
from support.drivers.tiered_driver import POOL, tiered
from support.drivers.tree_driver import PAGE, TreeDriver
from support.drivers.tree_requests import prompt, serve


@pytest.fixture
def buffered() -> tuple[TreeDriver, LowerTiers]:
    """A real tree, and a copy of four pages of it that is on its way into storage."""
    driver, tiers = tiered("write_through", is_buffer=True)
    serve(driver, prompt(0, 4))
    tiers.hand_over(driver.cache)
    assert in_storage(driver) == 4 * PAGE
    return driver, tiers


def in_storage(driver: TreeDriver) -> int:
    """Tokens of nodes that count as stored."""
    tree = driver.component.state.tree
    return sum(len(node.key) for node in driver.all_nodes() if tree.metadata(node).in_storage)


def written(driver: TreeDriver) -> int:
    return driver.component.state.counters.written_tokens[Tier.STORAGE]


def test_a_copy_counts_as_written_when_it_has_arrived(buffered) -> None:
    driver, tiers = buffered
    assert written(driver) == 0
    tiers.settle(driver.cache)
    assert [len(tokens) for tokens in tiers.stored] == [4 * PAGE]
    assert written(driver) == in_storage(driver) == 4 * PAGE
    (node,) = driver.all_nodes()
    metadata = driver.component.state.tree.metadata(node)
    metadata.is_demoted = True  # as far as a lower tier has it
    loss = driver.component.leaves.loss(node)
    assert loss < driver.component.state.policy.loss(Tier.DEVICE, metadata, below=None)
    driver.cache.sanity_check()


def test_what_is_evicted_before_it_has_arrived_went_to_storage(buffered) -> None:
    driver, tiers = buffered
    driver.evict(POOL)
    assert not list(driver.all_nodes())
    counters = driver.component.state.counters
    assert (counters.demoted_tokens[Tier.DEVICE], sum(counters.dropped_tokens.values())) == (4 * PAGE, 0)
    tiers.settle(driver.cache)
    assert written(driver) == 4 * PAGE
    serve(driver, prompt(0, 4))
    assert in_storage(driver) == 4 * PAGE, "sglang will not write it again"
    assert counters.missed_tokens[Reason.STORAGE] > 0
    driver.cache.sanity_check()


def test_all_parts_of_a_node_that_was_cut_are_handed_over() -> None:
    driver, tiers = tiered("write_through", is_buffer=True)
    serve(driver, prompt(0, 4))
    driver.cache.buffer_pipeline.flush_pending_writes()
    serve(driver, prompt(0, 2) + prompt(500, 1))  # while the first is copied
    tiers.settle(driver.cache)
    assert in_storage(driver) == written(driver) == 4 * PAGE
    driver.cache.sanity_check()


@pytest.mark.parametrize("meanwhile", ["nothing", "cut", "evicted"])
def test_a_write_that_failed_is_that_of_all_that_is_left_of_a_node(buffered, meanwhile: str) -> None:
    driver, tiers = buffered
    if meanwhile == "cut":
        serve(driver, prompt(0, 2) + prompt(500, 1))
    elif meanwhile == "evicted":
        driver.evict(POOL)
    tiers.is_full = True
    tiers.fail_started()
    tiers.settle(driver.cache)
    assert (in_storage(driver), written(driver)) == (0, 0)
    driver.cache.sanity_check()

"""Ages on the real tree: which tier answered, what was evicted when, and what lies there."""

from __future__ import annotations

import pytest

from sgl_importance.nodes.ages import NOWHERE, Ages
from sgl_importance.tiers import Tier
from sglang_importance.cache.resident_ages import NODES_AT_A_TIME, ResidentAges

from support.drivers.tree_driver import PAGE, TreeDriver
from support.drivers.tree_requests import path_of, prompt, serve


class Now:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def driver(now: Now) -> TreeDriver:
    driver = TreeDriver(tokens=512)
    driver.component.state.counters.ages = Ages(now)
    return driver


def ages_of(driver: TreeDriver) -> Ages:
    return driver.component.state.counters.ages


def test_a_hit_on_the_device_has_the_time_since_the_request_before(driver: TreeDriver, now: Now):
    serve(driver, prompt(0, 4))
    now.seconds = 100.0
    serve(driver, prompt(0, 4) + prompt(500, 2))
    (device,) = (each for place, each in ages_of(driver).returned.items() if each.weight)
    assert device is ages_of(driver).returned[Tier.DEVICE]
    assert device.total / device.weight == 100.0
    now.seconds = 130.0
    before = device.weight
    serve(driver, prompt(0, 4))
    assert (device.total - 100.0 * before) / (device.weight - before) == 30.0


def test_an_eviction_has_age_and_reuses_and_a_late_return_is_found_nowhere(driver: TreeDriver, now: Now):
    serve(driver, prompt(0, 4))
    now.seconds = 10.0
    serve(driver, prompt(0, 4))
    now.seconds = 70.0
    driver.evict(10**6)
    ages = ages_of(driver)
    evicted, reuses = ages.evicted[Tier.DEVICE], ages.reuses[Tier.DEVICE]
    found = 3 * PAGE  # a prompt's last page is always computed, and not asked of the cache
    assert evicted.weight == reuses.weight == found + PAGE
    assert evicted.total == 60.0 * found + 70.0 * PAGE
    assert reuses.total == found
    now.seconds = 310.0
    serve(driver, prompt(0, 4))
    lost = ages.returned[NOWHERE]
    assert lost.total == 300.0 * found + 310.0 * PAGE


def test_what_the_host_gives_back_was_found_there(driver: TreeDriver, now: Now):
    serve(driver, prompt(0, 4))
    for node, _ in path_of(driver, prompt(0, 4)):
        driver.back_up(node.id)
    now.seconds = 5.0
    driver.evict(10**6)
    now.seconds = 50.0
    request = driver.admit(prompt(0, 4) + prompt(700, 1))
    request.cached_tokens_host, request.cached_tokens_device = request.cached_tokens_device, 0
    driver.prefill(request)
    driver.finish(request)
    host = ages_of(driver).returned[Tier.HOST]
    assert host.total == 50.0 * host.weight > 0
    assert ages_of(driver).returned[Tier.DEVICE].weight == 0


def test_going_round_the_tree_sees_every_node_and_its_age(driver: TreeDriver, now: Now):
    resident = ResidentAges(driver.component.state)
    serve(driver, prompt(0, 4))
    now.seconds = 1000.0
    for number in range(1, 2 * NODES_AT_A_TIME):
        serve(driver, prompt(1000 * number, 1))
    for _ in range(3):
        resident.go_on()
    ages = ages_of(driver)
    held = sum(driver.component.state.tree.metadata(node).tokens for node in driver.all_nodes())
    assert ages.resident[Tier.DEVICE].weight == held
    old = sum(metadata.tokens for _, metadata in path_of(driver, prompt(0, 4)))
    assert ages.resident[Tier.DEVICE].total == pytest.approx(1000.0 * old)
    assert ages.resident[Tier.HOST].weight == 0


def test_a_round_outlives_evictions_and_a_flush(driver: TreeDriver):
    resident = ResidentAges(driver.component.state)
    for number in range(NODES_AT_A_TIME + 8):
        serve(driver, prompt(1000 * number, 1))
    resident.go_on()
    driver.evict(10**6)
    resident.go_on()
    assert ages_of(driver).resident[Tier.DEVICE].weight == NODES_AT_A_TIME * PAGE, "as it was looked at"
    for number in range(NODES_AT_A_TIME + 8):
        serve(driver, prompt(1000 * number, 1))
    resident.go_on()
    driver.cache.reset()
    serve(driver, prompt(0, 2))
    resident.go_on()
    assert ages_of(driver).resident[Tier.DEVICE].weight == 2 * PAGE

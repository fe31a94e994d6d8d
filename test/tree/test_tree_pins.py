"""Soft pins on the real tree: what they keep, and what they leave to others."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import pytest
from sglang.srt.mem_cache.radix_cache import RadixKey

from sgl_importance.metrics_table import FaultPlace
from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.placement_options import PinOptions
from sgl_importance.placement.pins.pin import HALF_LIFE_REQUESTS, Pin
from sgl_importance.tiers import Tier

from support.drivers.tree_driver import PAGE, TreeDriver
from support.drivers.tree_requests import path_of, prompt, serve

POOL = 256


@pytest.fixture
def driver(make_driver) -> TreeDriver:
    driver = make_driver(
        tokens=POOL, options=ImportanceOptions(policy="importance", pins=PinOptions(budget=0.25))
    )
    driver.component.pins.capacity_tokens = lambda: {Tier.DEVICE: POOL, Tier.HOST: POOL}
    return driver


def pin(driver: TreeDriver, tokens: list[int], name: str = "p", **kwargs) -> Pin:
    wanted = Pin(name, array("q", tokens), **kwargs)
    driver.component.pins.pin(wanted)
    return wanted


def resident(driver: TreeDriver, tokens: list[int], salt: str | None = None) -> int:
    """Leading tokens on the device; looks without touching."""
    return driver.core.match_full_device_prefix(RadixKey(array("q", tokens), cache_salt=salt))[0]


def scan(driver: TreeDriver, tokens: int, start: int = 10_000) -> None:
    """One-off prompts of so many tokens."""
    for first in range(start, start + tokens, 4 * PAGE):
        serve(driver, prompt(first, 4))
    driver.component.check_integrity()


@pytest.mark.parametrize("pinned_first", [True, False])
def test_a_pinned_prefix_survives_a_scan_of_ten_times_the_pool(driver: TreeDriver, pinned_first: bool):
    tokens = prompt(0, 12)
    if pinned_first:
        pin(driver, tokens)
    serve(driver, tokens + prompt(500, 2))
    if not pinned_first:
        pin(driver, tokens)
    scan(driver, 10 * POOL)
    # The text that followed the pin is gone, the pin's last page is not.
    assert resident(driver, tokens + prompt(500, 2)) == len(tokens)


def test_a_pin_reaches_nodes_that_no_request_could_go_on_from(
    driver: TreeDriver, monkeypatch: pytest.MonkeyPatch
):
    """Beside windows or linear attention a match ends where their state is gone, the text does not."""
    tokens = prompt(0, 12)
    serve(driver, tokens + prompt(500, 2))
    match, root = driver.cache.match_prefix, driver.core.root_node.id
    with monkeypatch.context() as without_state:
        found = lambda params: match(params)._replace(best_match_node=root)  # noqa: E731
        without_state.setattr(driver.cache, "match_prefix", found)
        pin(driver, tokens)
    scan(driver, 10 * POOL)
    assert resident(driver, tokens + prompt(500, 2)) == len(tokens)


def test_without_a_pin_it_does_not(driver: TreeDriver):
    serve(driver, prompt(0, 12))
    scan(driver, 10 * POOL)
    assert resident(driver, prompt(0, 12)) == 0


def test_a_node_is_cut_where_the_budget_ends(driver: TreeDriver):
    tokens = prompt(0, 24)  # the budget is 16 pages
    serve(driver, tokens)
    held = pin(driver, tokens)
    assert held.granted == {Tier.DEVICE: 16, Tier.HOST: 16}
    scan(driver, 10 * POOL)
    assert resident(driver, tokens) == 16 * PAGE


def test_pins_that_fill_their_budget_leave_the_rest_to_others(driver: TreeDriver):
    pin(driver, prompt(0, 40))
    serve(driver, prompt(0, 40))
    scan(driver, 2 * POOL)
    mine = prompt(50_000, 40)
    serve(driver, mine)
    # 64 pages, of which pins hold 16.
    assert resident(driver, mine) == 40 * PAGE
    assert resident(driver, prompt(0, 40)) == 16 * PAGE


def test_a_pool_full_of_pins_still_serves(make_driver):
    driver = make_driver(
        tokens=POOL, options=ImportanceOptions(policy="importance", pins=PinOptions(budget=1.0))
    )
    for serial in range(4):
        tokens = prompt(1000 * serial, 16)
        pin(driver, tokens, str(serial))
        serve(driver, tokens[:-1])
    scan(driver, 4 * POOL)
    assert driver.component.state.counters.requests == 4 + 4 * POOL // (4 * PAGE)
    serve(driver, prompt(90_000, 40))
    assert resident(driver, prompt(90_000, 40)) == 40 * PAGE


def test_one_tenant_s_pins_do_not_weaken_another_s(driver: TreeDriver):
    for serial in range(4):
        pin(driver, prompt(1000 * serial, 16), f"greedy{serial}", cache_salt="greedy")
    mine = pin(driver, prompt(0, 8), "mine", cache_salt="modest")
    assert mine.granted[Tier.DEVICE] == 8
    greedy = [p.granted[Tier.DEVICE] for p in driver.component.pins.current() if p.tenant == "greedy"]
    assert sum(greedy) == 8


def test_a_pin_holds_only_for_requests_of_its_salt(driver: TreeDriver):
    tokens = prompt(0, 8)
    pin(driver, tokens, cache_salt="a")
    serve(driver, tokens)
    scan(driver, 10 * POOL)
    assert resident(driver, tokens) == 0


def test_unpinned_is_forgotten_like_anything_else(driver: TreeDriver):
    tokens = prompt(0, 8)
    pin(driver, tokens)
    serve(driver, tokens)
    driver.component.pins.unpin("p")
    scan(driver, 10 * POOL)
    assert resident(driver, tokens) == 0
    with pytest.raises(KeyError):
        driver.component.pins.unpin("p")


class BrokenKeeper:
    """A ledger, which only the leader of several ranks has, that fails."""

    def keep_pins(self, pins: Iterable[Pin]) -> None:
        raise OSError("planned")

    def surviving_pins(self) -> frozenset[str]:
        return frozenset()


def test_a_ledger_that_fails_ends_learning_on_no_rank(driver: TreeDriver):
    driver.component.pins.keeper = BrokenKeeper()
    tokens = prompt(0, 8)
    pin(driver, tokens)
    serve(driver, tokens)
    faults = driver.component.state.faults
    assert faults.is_learning
    assert faults.counts[FaultPlace.RECORDING] == 1
    assert [kept.pin_id for kept in driver.component.pins.current()] == ["p"]


def test_a_lifetime_ends_while_requests_come(driver: TreeDriver):
    now = 0.0
    driver.component.pins.now = lambda: now
    tokens = prompt(0, 8)
    pin(driver, tokens, expires_at=100.0)
    serve(driver, tokens)
    scan(driver, 5 * POOL)
    assert resident(driver, tokens) == len(tokens)
    now = 100.0
    scan(driver, 10 * POOL)
    assert resident(driver, tokens) == 0
    assert driver.component.pins.current() == []


def test_a_pin_that_nobody_uses_fades_and_one_that_is_used_does_not(driver: TreeDriver):
    used, unused = prompt(0, 8), prompt(1000, 8)
    for name, tokens in (("used", used), ("unused", unused)):
        pin(driver, tokens, name)
        serve(driver, tokens)
    for _ in range(8):
        driver.component.state.policy.reuse.clock += HALF_LIFE_REQUESTS
        serve(driver, [*used, 1])
    scan(driver, 10 * POOL)
    assert [p.pin_id for p in driver.component.pins.current()] == ["used"]
    assert (resident(driver, used), resident(driver, unused)) == (len(used), 0)


def test_a_pin_without_room_is_used_too(driver: TreeDriver):
    """It would end as one that nobody uses."""
    pin(driver, prompt(0, 16), "fills the budget")
    tokens = prompt(1000, 4)
    waiting = pin(driver, tokens, "waiting")
    serve(driver, prompt(0, 16))
    for _ in range(3):
        serve(driver, tokens)
    assert waiting.last_used >= driver.component.state.policy.clock - 1


def test_a_split_keeps_the_pin_on_both_halves(driver: TreeDriver):
    tokens = prompt(0, 8)
    pin(driver, tokens)
    serve(driver, tokens)
    serve(driver, tokens[: 5 * PAGE] + prompt(700, 2))
    octaves = [metadata.pin_octaves for _, metadata in path_of(driver, tokens)]
    assert len(octaves) == 2
    assert all(each.get(Tier.DEVICE) for each in octaves)
    scan(driver, 10 * POOL)
    assert resident(driver, tokens) == len(tokens)


def test_demotion_keeps_the_pin_on_the_host(driver: TreeDriver):
    pinned, others = prompt(0, 8), [prompt(1000 * serial, 8) for serial in range(1, 6)]
    pin(driver, pinned)
    for tokens in [pinned, *others]:
        serve(driver, tokens)
        driver.back_up(path_of(driver, tokens)[-1][0].id)
    driver.evict(POOL)
    assert resident(driver, pinned) == 0
    driver.evict_host(5 * 8 * PAGE)
    request = driver.admit([*pinned, 1])
    assert request.cached_tokens_device == len(pinned), "loaded back from the host"
    driver.abort(request)
    driver.component.check_integrity()


def test_a_removed_prefix_is_pinned_again_when_it_returns(driver: TreeDriver):
    tokens = prompt(0, 8)
    pin(driver, tokens)
    serve(driver, tokens)
    driver.evict(POOL)
    assert resident(driver, tokens) == 0
    serve(driver, tokens)
    scan(driver, 10 * POOL)
    assert resident(driver, tokens) == len(tokens)


def test_a_flush_empties_the_tree_and_keeps_the_pins(driver: TreeDriver):
    tokens = prompt(0, 8)
    pin(driver, tokens)
    serve(driver, tokens)
    driver.cache.reset()
    assert resident(driver, tokens) == 0
    serve(driver, tokens)
    scan(driver, 10 * POOL)
    assert resident(driver, tokens) == len(tokens)


def test_pins_hold_after_a_restart(driver: TreeDriver, make_driver):
    tokens = prompt(0, 8)
    pin(driver, tokens)
    restarted = make_driver(tokens=POOL)
    again = [Pin(each.pin_id, each.tokens[:]) for each in driver.component.pins.table.requested()]
    assert restarted.component.pins.restore(again) == again
    serve(restarted, tokens)
    scan(restarted, 10 * POOL)
    assert resident(restarted, tokens) == len(tokens)

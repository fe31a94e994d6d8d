"""Each action on the real tree moves the series that it is about, and no other."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

import numpy as np
import pytest

from sgl_importance.metrics_table import METRICS, OPERATIONS, Kind, Process, of_process
from sgl_importance.observe.shadow.shadow_pair import ShadowPair
from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.placement_options import PinOptions
from sgl_importance.placement.pins.pin import Pin
from sgl_importance.reuse.calibration import HORIZON
from sgl_importance.signal.node_importance import NodeImportance
from sgl_importance.tiers import Tier
from sglang_importance.cache.cache_factory import gauge_values
from sglang_importance.metrics.publisher import counter_values, histograms, label_values
from sglang_importance.operations import handlers
from sglang_importance.operations.runner import Desk
from sglang_importance.placement.prewarm_request import new_rid
from sglang_importance.tree.body_mass import body_mass_of

from support.drivers.shadowed_tree import settle, shadowed
from support.drivers.tiered_driver import tiered
from support.drivers.tree_driver import PAGE, TreeDriver
from support.drivers.tree_requests import pages, path_of, prompt, serve

REQUEST = {"requests_total", "prompt_tokens_total", "missed_tokens_total", "fold_seconds_total"}
HIT = REQUEST | {"hit_requests_total", "hit_tokens_total", "return_age_seconds"}
EVICTION = {
    *("evicted_nodes_total", "evicted_tokens_total", "used_tokens"),
    *("eviction_age_seconds", "eviction_reuses"),
}
OF_THE_EMITTING_BACKEND = {"emissions_total", "emission_seconds_total"}
"""Moved in test/serve/test_metrics.py: there is no attention here."""
OF_ALL_THAT_LIES_THERE = {"resident_tokens_by_idle_seconds"}
"""In test_ages.py: a request goes on to look at the whole tree, whatever it did itself."""


def values(driver: TreeDriver) -> dict[tuple[str, tuple[str, ...]], float]:
    counters = driver.component.state.counters
    weights = {
        name: {labels: histogram.weight for labels, histogram in by_label.items()}
        for name, by_label in histograms(counters).items()
    }
    families = {**counter_values(counters), **gauge_values(driver.cache), **weights}
    return {
        (name, label_values(labels)): value
        for name, family in families.items()
        for labels, value in family.items()
    }


def moved(driver: TreeDriver, act: Callable[[], object]) -> set[str]:
    before = values(driver)
    act()
    driver.component.check_integrity()
    after = values(driver)
    kinds = {metric.name: metric.kind for metric in METRICS}
    names = {name for (name, labels), value in after.items() if value != before.get((name, labels), 0)}
    names -= OF_ALL_THAT_LIES_THERE
    for series, value in after.items():
        assert kinds[series[0]] is Kind.GAUGE or value >= before.get(series, 0), f"{series} fell"
    return names


def cold(driver: TreeDriver) -> set[str]:
    return moved(driver, lambda: serve(driver, prompt(0, 4)))


def test_a_request_that_finds_nothing(make_driver):
    assert cold(make_driver()) == REQUEST | {"used_tokens"}


def test_a_request_that_finds_its_prompt(make_driver):
    driver = make_driver()
    cold(driver)
    assert moved(driver, lambda: serve(driver, prompt(0, 4))) == HIT
    counters = driver.component.state.counters
    assert counters.hit_tokens[Tier.DEVICE] == 3 * PAGE  # its last token is always computed
    assert counters.prompt_tokens == 8 * PAGE


def test_attention_that_is_folded(make_driver):
    driver = make_driver()
    cold(driver)
    act = lambda: serve(driver, prompt(0, 4), prefill=pages(1, 2, 1, 0))  # noqa: E731
    assert moved(driver, act) == HIT | {"folds_total", "nodes", "body_mass"}


def test_what_is_evicted_is_dropped_where_no_lower_tier_has_it(make_driver):
    driver = make_driver()
    serve(driver, prompt(0, 4), prefill=pages(1, 2, 1, 0))
    mass = {"nodes", "body_mass", "evicted_body_mass_total"}
    assert moved(driver, lambda: driver.evict(1)) == EVICTION | mass | {"dropped_tokens_total"}
    assert driver.component.state.counters.evicted_body_mass == pytest.approx(1.0)
    assert driver.component.body_mass.total == 0


def test_what_is_evicted_is_demoted_where_the_host_has_it_and_is_loaded_back(make_driver):
    driver = make_driver()
    serve(driver, prompt(0, 4), prefill=pages(1, 2, 1, 0))
    ((node, _),) = path_of(driver, prompt(0, 4))
    assert moved(driver, lambda: driver.back_up(node.id)) == {"written_tokens_total"}
    mass = {"nodes", "body_mass"}
    lost = mass | {"evicted_body_mass_total", "demoted_tokens_total"}
    assert moved(driver, lambda: driver.evict(1)) == EVICTION | lost
    loaded = {"loaded_back_nodes_total", "loaded_back_tokens_total"}
    assert moved(driver, lambda: driver.load_back(node.id)) == mass | loaded | {"used_tokens"}
    assert driver.component.state.counters.loaded_back_tokens == 4 * PAGE


def test_a_copy_that_the_host_gives_up_while_the_device_has_the_kv_is_no_eviction():
    """Upstream takes such copies first under ``write_back``; nothing is lost with them."""
    driver, tiers = tiered("write_back", storage=False)
    serve(driver, prompt(0, 4))
    driver.evict(1)
    serve(driver, prompt(0, 4))  # it comes back, and stays in the host
    tiers.settle(driver.cache)
    held = driver.core.full_host_duplicates
    assert held
    assert moved(driver, lambda: driver.evict_host(4 * PAGE)) == {"used_tokens"}
    assert not held
    told = [(event.kind, event.tier, event.reason) for _, event in driver.component.state.events.since(0, 99)]
    assert told[-1] == ("evict", "host", "stock_order")
    assert moved(driver, lambda: driver.evict(1)) >= {"demoted_tokens_total"}, "copied anew"


def test_copies_that_are_made():
    driver, tiers = tiered("write_through", storage=False)

    def act() -> None:
        serve(driver, prompt(0, 4))
        tiers.settle(driver.cache)

    assert moved(driver, act) == REQUEST | {"used_tokens", "written_tokens_total"}


def prewarm(driver: TreeDriver, tokens: list[int]) -> None:
    request = driver.admit(tokens)
    request.rid = new_rid()
    driver.prefill(request)
    driver.finish(request)


def test_a_pre_warm_is_no_request_and_its_first_hit_is_counted_once(make_driver):
    driver = make_driver()
    tokens = [*prompt(0, 4), 1]
    assert moved(driver, lambda: prewarm(driver, tokens)) == {"used_tokens"}
    assert (
        moved(driver, lambda: serve(driver, tokens))
        == HIT - {"return_age_seconds"} | {"prewarmed_hit_tokens_total"}  # nobody had asked for it before
    )
    assert moved(driver, lambda: serve(driver, tokens)) == HIT
    assert driver.component.state.counters.prewarmed_hit_tokens == 4 * PAGE


def test_pins_within_their_budget(make_driver):
    driver = make_driver()
    pins = driver.component.pins
    wanted = Pin("p", array("q", prompt(0, 2)))
    assert moved(driver, lambda: pins.pin(wanted)) == {"pins", "pinned_tokens"}
    assert pins.budgets()[Tier.DEVICE][0] == 2 * PAGE
    assert moved(driver, lambda: pins.unpin("p")) == {"pins", "pinned_tokens"}
    smaller = make_driver(
        options=ImportanceOptions(policy="importance", pins=PinOptions(budget=0.125)), tokens=128
    )
    differ = {name for (name, _), value in values(smaller).items() if value != values(driver)[name, _]}
    assert differ == {"size_tokens", "pin_budget_tokens"}
    assert smaller.component.pins.budgets()[Tier.DEVICE] == (0, 16)


def test_predictions_are_judged_when_their_horizon_is_over(make_driver):
    driver = make_driver(tokens=4096)
    counters = driver.component.state.counters
    judged = {"reuse_predictions_total", "reuse_predicted_total", "reuse_observed_total"}

    def act(count: int) -> Callable[[], None]:
        def visits() -> None:
            for start in range(count):
                serve(driver, prompt(100 * (start % 5), 4))

        return visits

    assert not moved(driver, act(HORIZON)) & judged
    assert moved(driver, act(64)) & judged == judged
    calibration = counters.calibration
    assert calibration.observed == calibration.judged, "each of the five came back"
    driver.cache.reset()
    assert not calibration._pending


def test_a_prediction_comes_true_through_an_eviction(make_driver):
    driver = make_driver()
    tokens = prompt(0, 4)
    serve(driver, tokens)
    ((_, metadata),) = path_of(driver, tokens)
    for prediction in (True, False):
        metadata.prediction = driver.component.state.counters.calibration.predict(0.5, clock=1)
        waiting = metadata.prediction
        driver.evict(1)
        serve(driver, tokens if prediction else prompt(900, 4))
        assert waiting.came_true is prediction
        ((_, metadata),) = path_of(driver, tokens) if prediction else [(None, None)]


def test_every_operation_has_its_series():
    assert set(OPERATIONS) == set(handlers.OPERATIONS)


def test_operations_are_timed(make_driver):
    driver = make_driver()
    counters = driver.component.state.counters
    desk = Desk(
        driver.cache,
        {"pins": lambda cache, _: {}, "snapshot": lambda cache, _: two_slices()},
        on_slice=lambda operation, seconds, is_over: counters.answered(operation, seconds, is_over=is_over),
    )

    def two_slices():
        time.sleep(0.001)
        yield
        time.sleep(0.001)
        return {}

    spent = {"operations_total", "operation_seconds_total"}
    assert moved(driver, lambda: desk.begin("pins", {})) == spent
    reply = desk.begin("snapshot", {})
    assert counters.operations["snapshot"] == 0
    assert desk.resume(reply.job).document == "{}"
    assert counters.operations["snapshot"] == 1
    assert counters.operation_seconds["snapshot"] >= 0.002
    assert counters.operations["pins"] == 1


def test_observe_says_what_importance_would_have_saved_and_lost(make_driver):
    driver = make_driver("observe", tokens=128)
    component = driver.component
    pair = ShadowPair(128 // PAGE, PAGE, component.state.policy.cost, 256)
    shadowing = shadowed(component, pair)
    own = {metric.name for metric in METRICS if metric.name.startswith("shadow_")}

    def traffic() -> None:
        for start in range(0, 6000, 100):
            serve(driver, prompt(start % 700, 4), prefill=pages(1, 1, 1, 1))
            serve(driver, prompt(5000, 4))
        driver.evict(10**6)
        serve(driver, prompt(5000, 4))  # asked for all the time, and older than what comes once
        serve(driver, [*prompt(9000, 4), 1])
        driver.evict(1)
        serve(driver, [*prompt(9000, 4), 1])
        settle(shadowing)
        shadowing.count(component.state.counters)

    assert moved(driver, traffic) >= own
    reasons = {reason for (_, reason), tokens in component.state.counters.evicted_tokens.items() if tokens}
    assert reasons == {"stock_order"}


def test_under_importance_the_series_of_observe_stand_still(make_driver):
    driver = make_driver(tokens=128)
    names = moved(driver, lambda: [serve(driver, prompt(100 * i % 700, 4)) for i in range(60)])
    assert not [name for name in names if name.startswith("shadow_")]


def test_body_mass_follows_cuts_and_returns(make_driver):
    driver = make_driver()
    serve(driver, prompt(0, 4), prefill=pages(1, 2, 1, 0))
    book = driver.component.body_mass
    serve(driver, prompt(0, 2) + prompt(500, 2))  # cuts the node in two
    assert len(book) == 2
    assert book.total == pytest.approx(1.0)
    driver.evict(10**6)
    assert (len(book), book.total) == (0, 0.0)
    serve(driver, prompt(0, 4))  # ghosts give it back
    assert book.total == pytest.approx(1.0)
    driver.component.check_integrity()
    assert body_mass_of(NodeImportance(3)) == 0 == np.zeros(3).sum()


def test_the_table_and_what_is_counted_name_the_same_series(make_driver):
    driver = make_driver()
    counted = {name for name, _ in values(driver)}
    assert counted == {metric.name for metric in of_process(Process.SCHEDULER)}
    labelled = {(metric.name, labels) for metric in METRICS for labels in metric.children()}
    live = {series for series, value in values(driver).items() if value}
    assert live <= labelled
    for metric in METRICS:
        is_total = metric.name.endswith("_total")
        assert is_total == (metric.kind is Kind.COUNTER), metric.name

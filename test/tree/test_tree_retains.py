"""What requests that retain their prompts cost the scheduler, and what they are answered."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.placement_options import PinOptions
from sgl_importance.placement.pins import pin_table
from sgl_importance.placement.pins.pin import Pin, PinSource
from sgl_importance.placement.pins.pin_room import divide
from sgl_importance.tiers import Tier
from sglang_importance.upstream.request_record import record_of

from support.drivers.hinted_requests import ask, envelope
from support.drivers.tree_driver import PAGE, Request, TreeDriver
from support.drivers.tree_requests import prompt


def make_driver(pin_budget: float = 0.5) -> TreeDriver:
    return TreeDriver(options=ImportanceOptions(policy="importance", pins=PinOptions(budget=pin_budget)))


def outcome(request: Request) -> dict[str, Any]:
    hinted = record_of(request).hinted
    assert hinted is not None
    return hinted.outcome["retain"]


def retain(driver: TreeDriver, tokens: list[int], *, ttl: float = 600.0) -> Request:
    return ask(driver, tokens, retain={"ttl_seconds": ttl})


def test_a_hint_ends_no_pin_of_the_operator_whatever_its_name():
    driver = make_driver()
    pins = driver.component.pins
    named = Pin("hint-of-the-operator", array("q", prompt(0, 2)), expires_at=pins.now() + 60)
    pins.pin(named)
    assert outcome(retain(driver, prompt(0, 3)))["applied"]
    assert pins.table.get(named.pin_id) is named
    assert len(pins.table) == 2


def test_each_turn_of_a_session_divides_the_budgets_once(monkeypatch: pytest.MonkeyPatch):
    """However many sessions came before it."""
    driver = make_driver(pin_budget=0.25)
    table = driver.component.pins.table
    for session in range(40):
        retain(driver, prompt(1000 * (session + 1), 3))
    held = len(table)
    assert sum(len(pin.tokens) for pin in table.pins()) <= table.max_hinted_tokens
    for session in range(40, 80):
        retain(driver, prompt(1000 * (session + 1), 3))
    assert len(table) == held < 40
    visits: list[int] = []

    def counted(tier: Tier, budget: int, pins: Sequence[Pin]) -> int:
        visits.append(len(pins))
        return divide(tier, budget, pins)

    monkeypatch.setattr(pin_table, "divide", counted)
    for pages in (3, 4, 5):  # supersedes the one before
        visits.clear()
        retain(driver, prompt(500_000, pages))
        assert len(visits) == 1, "one tier, one division"
        assert visits[0] <= held
    driver.component.check_integrity()


def test_the_tree_is_cut_behind_the_answers_and_the_answer_says_what_is_granted():
    driver = make_driver()
    request = driver.admit(prompt(0, 6))
    request.kv_hints = envelope(retain={"ttl_seconds": 60}, report=True)
    driver.prefill(request)
    driver.decode(request, [7] * PAGE)
    before = [len(node.key) for node in driver.all_nodes()]

    def process() -> None:
        driver.finish(request)
        assert outcome(request)["applied"]
        assert outcome(request)["tokens"] == 6 * PAGE
        assert not any(driver.component.state.tree.metadata(node).pin_octaves for node in driver.all_nodes())

    driver.component.deferred_work.around(process)()
    known = [driver.component.state.tree.metadata(node) for node in driver.all_nodes()]
    after = sorted((metadata.depth, bool(metadata.pin_octaves)) for metadata in known)
    assert len(after) == len(before) + 1
    assert after[0] == (0, True)
    assert after[-1] == (6 * PAGE, False)
    driver.component.check_integrity()


def test_a_prompt_beyond_every_budget_is_pinned_as_far_as_it_could_be_granted():
    driver = make_driver(pin_budget=0.1)
    budget = driver.component.pins.budgets()[Tier.DEVICE][1]
    pages = budget // PAGE + 4
    request = retain(driver, prompt(0, pages))
    assert outcome(request) == {"applied": True, "tokens": budget, "pin_id": outcome(request)["pin_id"]}
    (pin,) = driver.component.pins.current()
    assert len(pin.tokens) == budget
    again = retain(driver, prompt(0, pages + 1), ttl=6000.0)
    assert outcome(again)["pin_id"] == pin.pin_id
    assert len(driver.component.pins.current()) == 1
    driver.component.check_integrity()


def test_the_answer_says_how_many_pins_ended_for_it():
    driver = make_driver(pin_budget=0.1)
    budget = driver.component.pins.budgets()[Tier.DEVICE][1] // PAGE
    first = retain(driver, prompt(0, budget), ttl=60.0)
    second = retain(driver, prompt(1000, budget), ttl=600.0)
    assert "made_room" not in outcome(first) | outcome(second)
    assert not outcome(second)["applied"], "it waits for room"
    third = retain(driver, prompt(2000, 1), ttl=10.0)
    assert outcome(third)["made_room"] == 1
    assert not outcome(third)["applied"], "what waits longer comes first"
    kept = [pin.pin_id for pin in driver.component.pins.current()]
    assert outcome(first)["pin_id"] not in kept
    assert outcome(third).get("reason")
    assert len(kept) == 2
    driver.component.check_integrity()


def test_without_a_budget_nothing_is_retained():
    driver = make_driver(pin_budget=0.0)
    assert "--kv-importance-pin-budget" in outcome(retain(driver, prompt(0, 3)))["reason"]
    assert driver.component.pins.current() == []
    short = retain(make_driver(), prompt(0, 1)[: PAGE - 1])
    assert outcome(short)["reason"] == "the prompt fills no page"


def test_both_parts_of_a_prompt_that_is_pinned_in_part_know_how_the_answer_ended():
    """The cut at the end of the budget comes when the whole path has learnt it."""

    def known(**hints: Any) -> list[tuple[int, str, bool]]:
        driver = make_driver(pin_budget=0.1)
        request = driver.admit(prompt(0, 20))
        request.kv_hints = envelope(answer_end="tool_call", **hints)
        driver.prefill(request)
        driver.decode(request, [7] * (2 * PAGE))
        driver.finish(request)
        driver.component.check_integrity()
        nodes = [driver.component.state.tree.metadata(node) for node in driver.all_nodes()]
        return sorted((each.depth, each.answer_end.name, each.turn is None) for each in nodes)

    plain, pinned = known(), known(retain={"ttl_seconds": 60})
    assert len(pinned) == len(plain) + 1
    assert {facts[1:] for facts in pinned} == {facts[1:] for facts in plain}


def test_pins_of_the_operator_stay_as_they_were():
    driver = make_driver(pin_budget=0.1)
    driver.component.pins.pin(Pin("asked", array("q", prompt(0, 4))))
    for session in range(10):
        retain(driver, prompt(1000 * (session + 1), 4))
    requested = [pin for pin in driver.component.pins.current() if pin.source is PinSource.REQUESTED]
    assert [pin.pin_id for pin in requested] == ["asked"]

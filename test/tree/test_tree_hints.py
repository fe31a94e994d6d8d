"""What hints do to the nodes of a real tree."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.managers.kv_hints import decode_kv_hints_envelope
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.placement_options import PinOptions
from sgl_importance.placement.hints.hinted_request import HintedRequest
from sgl_importance.placement.hints.hints import Hints
from sgl_importance.reuse.reuse_class import BlockType, Transition
from sgl_importance.tiers import Tier
from sglang_importance.upstream.request_record import record_of

from support.doubles.lower_tiers import LowerTiers
from support.drivers.hinted_requests import ask, envelope
from support.drivers.tree_driver import PAGE, Request, TreeDriver
from support.drivers.tree_requests import path_of, prompt


def hinted_of(request: Request) -> HintedRequest:
    hinted = record_of(request).hinted
    assert hinted is not None
    return hinted


def report(request: Request) -> dict[str, Any]:
    return hinted_of(request).report(
        {
            Tier.DEVICE: request.cached_tokens_device,
            Tier.HOST: request.cached_tokens_host,
            Tier.STORAGE: request.cached_tokens_storage,
        }
    )


def evict(driver: TreeDriver, pages: int) -> None:
    driver.cache.evict(EvictParams(num_tokens=pages * PAGE))


def only(driver: TreeDriver, tokens: list[int]) -> NodeMetadata:
    ((_, metadata),) = path_of(driver, tokens)
    return metadata


def test_what_is_dropped_is_the_next_victim_however_recent():
    driver = TreeDriver()
    ask(driver, prompt(0, 3))
    ask(driver, prompt(100, 3), drop_after_use=True)
    evict(driver, 1)
    assert path_of(driver, prompt(100, 3)) == []
    assert only(driver, prompt(0, 3)).tokens == 3 * PAGE
    driver.cache.sanity_check()


def test_a_prefix_that_somebody_else_asked_for_keeps_its_worth():
    driver = TreeDriver()
    shared = prompt(0, 3)
    ask(driver, [*shared, *prompt(100, 2)], drop_after_use=True)
    ask(driver, [*shared, *prompt(200, 2)], drop_after_use=True)
    (_, prefix), (_, first) = path_of(driver, [*shared, *prompt(100, 2)])
    _, (_, second) = path_of(driver, [*shared, *prompt(200, 2)])
    assert (prefix.expendable, first.expendable, second.expendable) == (False, True, True)
    evict(driver, 4)
    assert only(driver, shared).tokens == 3 * PAGE


@pytest.mark.parametrize("hinted", [False, True])
def test_what_two_compute_at_a_time_keeps_its_worth(hinted: bool):
    """The second finds nothing when it is admitted, and brings the text a second time."""
    driver = TreeDriver()
    shared = prompt(0, 3)
    first, second = (driver.admit([*shared, *prompt(start, 2)]) for start in (100, 200))
    first.kv_hints = envelope(drop_after_use=True)
    if hinted:
        second.kv_hints = envelope(drop_after_use=True)
    for request in (first, second):
        driver.prefill(request)
    for request in (second, first):
        driver.decode(request, [7])
        driver.finish(request)
    (_, prefix), (_, own) = path_of(driver, [*shared, *prompt(100, 2)])
    _, (_, other) = path_of(driver, [*shared, *prompt(200, 2)])
    assert (prefix.expendable, own.expendable, other.expendable) == (False, True, hinted)
    driver.cache.sanity_check()


def test_what_a_ghost_knows_to_be_asked_for_is_not_dropped():
    driver = TreeDriver()
    for _ in range(2):
        ask(driver, prompt(0, 3))
    evict(driver, 3)
    request = ask(driver, prompt(0, 3), drop_after_use=True, report=True)
    assert not only(driver, prompt(0, 3)).expendable
    assert report(request)["hints"]["drop_after_use"] == {"applied": False, "tokens": 0}
    assert report(request)["lost_tokens"] == 3 * PAGE


def test_a_retracted_request_still_wants_what_it_drops_later():
    driver = TreeDriver()
    request = driver.admit(prompt(0, 3))
    request.kv_hints = envelope(drop_after_use=True)
    driver.prefill(request)
    driver.decode(request, [7])
    driver.retract(request)
    assert not only(driver, prompt(0, 3)).expendable


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_what_is_dropped_is_copied_nowhere_until_somebody_asks_for_it(write_policy: str):
    driver = TreeDriver(tokens=128, options=ImportanceOptions(policy="importance"))
    tiers = LowerTiers.attach(driver.cache, host_tokens=192, write_policy=write_policy, storage=True)
    driver.filter_backups()

    def backed_up() -> int:
        tiers.settle(driver.cache)
        return sum(len(node.key) for node in driver.all_nodes() if node.backuped)

    ask(driver, prompt(0, 3), drop_after_use=True)
    assert backed_up() == 0
    evict(driver, 3)
    assert backed_up() == 0
    assert path_of(driver, prompt(0, 3)) == []
    ask(driver, prompt(0, 3), drop_after_use=True)
    ask(driver, prompt(0, 3))
    if write_policy == "write_back":
        evict(driver, 3)
    assert backed_up() == 3 * PAGE
    driver.cache.sanity_check()


def test_a_report_tells_what_was_lost_where_and_when():
    driver = TreeDriver()
    ask(driver, prompt(0, 4))
    ask(driver, prompt(100, 2), drop_after_use=True)
    evict(driver, 6)
    ask(driver, prompt(200, 2))
    request = ask(driver, [*prompt(0, 4), *prompt(300, 1)], report=True)
    told = report(request)
    assert (told["prompt_tokens"], told["lost_tokens"]) == (5 * PAGE, 4 * PAGE)
    (lost,) = told["lost"]
    assert lost["loss"] > 0
    assert lost == {
        "tokens": 4 * PAGE,
        "tier": "device",
        "reason": "least_loss",
        "requests_ago": 2,
        "loss": lost["loss"],
    }
    again = report(ask(driver, prompt(100, 2), report=True))
    assert [lost["reason"] for lost in again["lost"]] == ["dropped_after_use"]
    # What the next insertion brings back is none of this request's business.


def test_block_types_and_a_tool_s_answer_move_the_class_of_a_node():
    driver = TreeDriver()
    system, question = prompt(0, 4), prompt(100, 2)
    ask(driver, [*system, *question], block_types=[{"type": "system", "tokens": [0, 5 * PAGE]}])
    assert only(driver, [*system, *question]).block_type is BlockType.SHARED_PREFIX
    turn = [*system, *question, *prompt(200, 3)]
    request = ask(driver, turn, block_types=[{"type": "tool_output"}], transition="tool_call")
    *_, (_, answer) = path_of(driver, turn)
    assert answer.block_type is BlockType.TOOL_OUTPUT
    assert answer.transition is Transition.TOOL_CALL
    assert hinted_of(request).outcome["transition"] == {"applied": True}
    # Without an earlier turn in the cache there is none to go on with.
    cold = ask(driver, prompt(500, 3), transition="tool_call")
    assert not hinted_of(cold).outcome["transition"]["applied"]


def test_retained_prompts_are_pins_of_their_salt_and_one_for_each_session():
    driver = TreeDriver(options=ImportanceOptions(policy="importance", pins=PinOptions(budget=0.5)))
    pins = driver.component.pins
    request = ask(driver, prompt(0, 3), retain={"ttl_seconds": 60})
    ask(driver, prompt(0, 5), retain={"ttl_seconds": 60})
    (pin,) = pins.current()
    assert len(pin.tokens) == 5 * PAGE
    assert hinted_of(request).outcome["retain"]["tokens"] == 3 * PAGE
    # A shorter lifetime on a longer text does not take the longer one away.
    ask(driver, prompt(0, 6), retain={"ttl_seconds": 10})
    assert len(pins.current()) == 2
    evict(driver, 200)
    ask(driver, prompt(300, 3))
    ask(driver, prompt(0, 2)[: PAGE - 1], retain={"ttl_seconds": 60})
    assert len(pins.current()) == 2
    driver.cache.sanity_check()


def test_under_observe_hints_predict_and_move_nothing():
    driver = TreeDriver("observe", options=ImportanceOptions(policy="observe"))
    request = ask(
        driver, prompt(0, 3), drop_after_use=True, report=True, block_types=[{"type": "tool_output"}]
    )
    retaining = ask(driver, prompt(100, 3), retain={"ttl_seconds": 60}, report=True)
    assert only(driver, prompt(0, 3)).block_type is BlockType.TOOL_OUTPUT
    assert not only(driver, prompt(0, 3)).expendable
    assert driver.component.pins.current() == []
    for told, name in ((request, "drop_after_use"), (retaining, "retain")):
        outcome = report(told)["hints"][name]
        assert not outcome["applied"]
        assert "--kv-policy observe" in outcome["reason"]
    evict(driver, 6)
    again = ask(driver, prompt(0, 3), report=True)
    assert [lost["reason"] for lost in report(again)["lost"]] == ["stock_order"]


def test_hints_that_came_past_the_http_process_do_not_end_the_server(caplog: pytest.LogCaptureFixture):
    driver = TreeDriver()
    request = driver.admit(prompt(0, 3))
    bad = {**Hints(report=True).actions()[0], "action_type": "sgl_importance.pin"}
    request.kv_hints = decode_kv_hints_envelope({**Hints().envelope(), "actions": [bad]})
    driver.prefill(request)
    driver.decode(request, [7])
    driver.finish(request)
    assert "unknown hint 'pin'" in caplog.text


def test_both_parts_of_a_cut_node_are_dropped_until_a_request_is_admitted_to_one():
    driver = TreeDriver()
    ask(driver, prompt(0, 4), drop_after_use=True)
    assert only(driver, prompt(0, 2)).expendable  # looking cuts the node
    assert [metadata.expendable for _, metadata in path_of(driver, prompt(0, 4))] == [True, True]
    ask(driver, [*prompt(0, 2), *prompt(100, 1)])
    assert [metadata.expendable for _, metadata in path_of(driver, prompt(0, 4))] == [False, True]


def test_generated_text_that_was_known_is_not_what_a_prompt_has_lost():
    driver = TreeDriver()
    for _ in range(2):
        request = driver.admit(prompt(0, 3))
        request.kv_hints = envelope(report=True)
        driver.prefill(request)
        driver.decode(request, list(range(900, 900 + 3 * PAGE)))
        driver.finish(request)
        evict(driver, 6)
    assert report(request)["lost_tokens"] == 3 * PAGE


def test_what_the_tree_has_seen_to_be_shared_is_not_called_the_user_s_own():
    driver = TreeDriver()
    shared = prompt(0, 3)
    for start in (100, 200, 300):
        ask(driver, [*shared, *prompt(start, 1)], block_types=[{"type": "user", "tokens": [0, None]}])
    assert only(driver, shared).block_type is BlockType.SHARED_PREFIX

"""The operations behind the routes, on the real tree without a server."""

from __future__ import annotations

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.tiers import Tier
from sglang_importance.operations import pin_operations
from sglang_importance.operations.pin_operations import SLICE_PAGES
from sglang_importance.operations.runner import Desk

from support.drivers.tree_driver import PAGE
from support.drivers.tree_requests import prompt, serve

POOL = 256
OPERATIONS = {name: getattr(pin_operations, name) for name in ("pin", "unpin", "pins")}


def ask(driver, operation: str, **arguments):
    desk = Desk(driver.cache, OPERATIONS)
    reply = desk.begin(operation, arguments)
    slices = 1
    while reply.job is not None:
        reply = desk.resume(reply.job)
        slices += 1
    return reply, slices


def pin(driver, tokens: list[int], name: str = "p", **arguments):
    namespace = {"extra_key": None, "cache_salt": None, "expires_at": None}
    return ask(driver, "pin", pin_id=name, tokens=tokens, **(namespace | arguments))


def test_a_pin_is_listed_with_its_budget_until_it_is_unpinned(make_driver):
    driver = make_driver(tokens=POOL)
    serve(driver, prompt(0, 8))
    reply, _ = pin(driver, prompt(0, 20), cache_salt=None)
    granted = POOL // 5 // PAGE * PAGE
    assert reply.document == (
        f'{{"pin_id": "p", "tokens": {20 * PAGE}, "granted_tokens": {{"device": {granted}}}}}'
    )
    listed, _ = ask(driver, "pins")
    assert '"resident_tokens": 32' in listed.document
    assert f'"budget": {{"device": {{"tokens": {granted}, "granted_tokens": {granted}}}}}' in listed.document
    assert ask(driver, "unpin", pin_id="p")[0].status == 200
    gone, _ = ask(driver, "unpin", pin_id="p")
    assert (gone.status, gone.error) == (
        404,
        "pin_id: there is no pin p: it was unpinned, has ended or never was",
    )


def test_a_long_prefix_is_hashed_in_slices(make_driver):
    driver = make_driver(tokens=4 * SLICE_PAGES * PAGE)
    assert pin(driver, prompt(0, 3 * SLICE_PAGES + 1))[1] == 4
    driver.component.check_integrity()


def test_what_cannot_be_pinned_is_the_caller_s_error(make_driver):
    driver = make_driver(tokens=POOL)
    reply, _ = pin(driver, [1, 2])
    assert (reply.status, reply.error) == (
        400,
        "shorter than one page of 4 tokens: there is nothing to pin",
    )
    assert pin(driver, prompt(0, POOL))[0].status == 400


def test_observe_refuses_pins(make_driver):
    driver = make_driver("observe", tokens=POOL, options=ImportanceOptions(policy="observe"))
    for reply in (pin(driver, prompt(0, 4))[0], ask(driver, "pins")[0]):
        assert reply.status == 400
        assert reply.error == (
            "pins move nothing under --kv-policy observe: start the server with --kv-policy importance"
        )


def test_the_host_tier_has_a_budget_of_its_own(make_driver):
    driver = make_driver(tokens=POOL)
    driver.component.pins.capacity_tokens = lambda: {Tier.DEVICE: POOL, Tier.HOST: 2 * POOL}
    reply, _ = pin(driver, prompt(0, 40))
    assert '"granted_tokens": {"device": 48, "host": 100}' in reply.document

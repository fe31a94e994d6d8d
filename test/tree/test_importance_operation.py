"""Asking about pages by their digests, on the real tree without a server."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from sgl_importance.interface import ImportanceSource
from sgl_importance.nodes.digests import chain_digests, root_digest
from sglang_importance.operations.page_importance import KEYS_PER_SLICE, importance
from sglang_importance.operations.runner import Desk
from sglang_importance.tree.page_lookup import SLICE_PAGES

from support.drivers.tree_driver import PAGE
from support.drivers.tree_requests import prompt, serve


def digests(tokens: list[int], *, cache_salt: str | None = None) -> list[bytes]:
    return chain_digests(root_digest(None, cache_salt), tokens, PAGE)


def ask(driver, keys: list[bytes]):
    desk = Desk(driver.cache, {"importance": importance})
    reply = desk.begin("importance", {"keys": [key.hex() for key in keys]})
    slices = 1
    while reply.job is not None:
        reply = desk.resume(reply.job)
        slices += 1
    return json.loads(reply.document), slices


def test_the_cache_is_a_source(make_driver):
    assert isinstance(make_driver().cache, ImportanceSource)


def test_a_page_keeps_its_importance_through_cuts_and_eviction(make_driver):
    driver = make_driver(tokens=1024)
    tokens = prompt(0, 8)
    creator = driver.admit(tokens)
    driver.prefill(creator, body=np.array([0, 0.5, 0.25, 0.25, 0, 0, 0, 0]))
    driver.finish(creator)
    reader = driver.admit(tokens)
    driver.prefill(reader, body=np.array([0, 0.25, 0.75, 0, 0, 0, 0, 0]))
    driver.finish(reader)
    keys = digests(tokens)
    before = [driver.cache.get_importance(key) for key in keys]
    assert before[2] is not None
    assert (before[2].cross_body_mass, before[2].queries) == (0.75, 1)
    assert before[2].body_mass == pytest.approx(0.5, abs=0.02)  # the creator's 0.25, a little aged

    serve(driver, tokens[: 3 * PAGE] + prompt(900, 2))  # cuts the node behind its third page
    assert [driver.cache.get_importance(key) for key in keys[3:]] == before[3:]
    kept = [driver.cache.get_importance(key) for key in keys]
    driver.evict(1024)
    assert not list(driver.component.state.tree.nodes())
    assert [driver.cache.get_importance(key) for key in keys] == kept


def test_what_nobody_looked_at_is_known_with_weight_0_and_what_never_came_is_not(make_driver):
    driver = make_driver()
    serve(driver, prompt(0, 4))
    known = driver.cache.get_importance(digests(prompt(0, 4))[0])
    assert known is not None
    assert (known.weight, known.body_mass, known.queries) == (0, 0, 0)
    assert driver.cache.get_importance(digests(prompt(500, 1))[0]) is None
    assert driver.cache.get_importance(digests(prompt(0, 1), cache_salt="other")[0]) is None
    assert driver.cache.get_importance(b"no digest") is None


def test_asking_changes_nothing_that_a_policy_reads(make_driver):
    driver = make_driver()
    serve(driver, prompt(0, 4))
    node = next(driver.component.state.tree.nodes())
    metadata = driver.component.state.tree.metadata(node)

    def facts():
        return metadata.accesses, metadata.last_access, metadata.importance.page_vectors().tolist()

    before, clock = facts(), driver.component.state.policy.clock
    for key in digests(prompt(0, 4)):
        driver.cache.get_importance(key)
    assert (facts(), driver.component.state.policy.clock) == (before, clock)


def test_no_look_up_hashes_more_than_a_slice(make_driver):
    driver = make_driver(tokens=4096 * PAGE)
    tokens = prompt(0, 3 * SLICE_PAGES)
    driver.cache.req_to_token_pool = type(driver.cache.req_to_token_pool)(8, len(tokens) + PAGE, "cpu", False)
    serve(driver, tokens)
    last = digests(tokens)[-1]
    answers = [driver.cache.get_importance(last) is not None for _ in range(4)]
    assert answers == [False, False, True, True]


def test_the_operation_answers_in_the_order_of_its_keys(make_driver):
    driver = make_driver()
    tokens = prompt(0, 4)
    serve(driver, tokens)
    keys = [*reversed(digests(tokens)), bytes(16)]
    document, _ = ask(driver, keys)
    assert (document["version"], document["page_size"]) == (1, PAGE)
    assert document["importance"] == [asdict(driver.cache.get_importance(key)) for key in keys[:-1]] + [None]
    _, slices = ask(driver, [bytes(16)] * (2 * KEYS_PER_SLICE))
    assert slices == 2
    assert ask(driver, [])[0]["importance"] == []


def test_a_connector_that_asks_for_no_key_ends_nothing(make_driver):
    driver = make_driver("importance")
    serve(driver, prompt(0, 2))
    key = digests(prompt(0, 1))[0]
    assert driver.cache.get_importance(bytearray(key)) is None  # which no table can look up
    assert driver.component.state.faults.is_learning
    assert driver.cache.get_importance(key) is not None


def test_a_flush_forgets_every_page(make_driver):
    driver = make_driver()
    serve(driver, prompt(0, 4))
    key = digests(prompt(0, 4))[0]
    assert driver.cache.get_importance(key) is not None
    driver.cache.reset()
    assert driver.cache.get_importance(key) is None
    driver.component.check_integrity()

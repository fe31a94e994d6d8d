"""Single events on the real tree: who folds what into whom, and what survives which move."""

from __future__ import annotations

from inspect import signature

import numpy as np
import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, CacheRequestOutcome

from sgl_importance.metrics_table import FaultPlace
from sgl_importance.misses.reason import Cause, Reason
from sgl_importance.observe.shadow.shadow_pair import ShadowPair
from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.reuse.reuse_class import BlockType
from sgl_importance.signal.node_importance import Origin
from sgl_importance.tiers import Tier
from sglang_importance.upstream.request_record import found_tokens, record_of

from support.drivers.shadowed_tree import settle, shadowed
from support.drivers.tree_driver import PAGE, TreeDriver
from support.drivers.tree_requests import pages, path_of, prompt, serve


def test_prefill_folds_into_the_request_s_own_nodes_as_self_mass(make_driver):
    driver = make_driver()
    tokens = prompt(0, 3)
    serve(driver, tokens, prefill=pages(1, 2, 1))
    ((_, metadata),) = path_of(driver, tokens)
    assert metadata.importance.body_mass(Origin.SELF) == pytest.approx([0.25, 0.5, 0.25])
    assert not metadata.importance.body_mass(Origin.CROSS).any()
    assert metadata.importance.queries == 0


def test_the_step_behind_a_one_token_answer_is_not_folded(make_driver):
    driver = make_driver()
    tokens = prompt(0, 2)
    serve(driver, tokens, prefill=pages(1, 0), decode=pages(0, 1, 0), output=(5,))
    ((_, metadata),) = path_of(driver, tokens)
    assert metadata.importance.body_mass() == pytest.approx([1, 0])
    assert not driver.rows.scores


def test_a_later_request_on_a_cached_prefix_folds_cross_mass(make_driver):
    driver = make_driver()
    document = prompt(0, 2)
    serve(driver, document, prefill=pages(1, 1))
    for question in (100, 200):
        serve(driver, document + prompt(question, 1), prefill=pages(0, 3, 1))
    ((_, metadata),) = path_of(driver, document)
    assert metadata.importance.body_mass(Origin.CROSS) == pytest.approx([0, 0.75])
    assert metadata.importance.queries == 2
    assert metadata.accesses == 2


def test_chunked_prefill_folds_once_at_its_end(make_driver):
    driver = make_driver()
    tokens = prompt(0, 4)
    request = driver.admit(tokens)
    driver.prefill(request, up_to=2 * PAGE, body=pages(1, 1))
    assert driver.component.state.counters.folds == 0
    driver.prefill(request, body=pages(0, 0, 1, 1))
    assert driver.component.state.counters.folds == 1
    assert driver.component.state.counters.requests == 1
    driver.finish(request)
    mass = np.concatenate([metadata.importance.body_mass() for _, metadata in path_of(driver, tokens)])
    assert mass == pytest.approx([0, 0, 0.5, 0.5])


def test_a_long_decode_counts_as_one_query(make_driver):
    driver = make_driver()
    tokens = prompt(0, 2)
    request = driver.admit(tokens)
    driver.prefill(request, body=pages(1, 1))
    for _ in range(20):
        driver.decode(request, [5])
    driver.decode(request, [5], body=pages(3, 1, 0, 0, 0, 0, 0, 0))
    driver.finish(request)
    ((_, metadata),) = path_of(driver, tokens)
    assert metadata.importance.weight(Origin.SELF) == pytest.approx([1.0, 1.0], abs=0.05)
    assert driver.component.state.counters.folds == 2


def test_generated_pages_are_handed_to_their_nodes_at_finish(make_driver):
    driver = make_driver()
    tokens, output = prompt(0, 2), tuple(prompt(50, 2))
    serve(driver, tokens, decode=pages(0, 1, 2, 1), output=output)
    (_, asked), (_, generated) = path_of(driver, [*tokens, *output])
    assert generated.importance.body_mass(Origin.SELF) == pytest.approx([0.5, 0.25])
    assert (asked.block_type, generated.block_type) == (BlockType.USER, BlockType.GENERATED)


@pytest.mark.parametrize("ending", ["retract", "abort"])
def test_retraction_and_abort_fold_what_was_seen(make_driver, ending: str):
    driver = make_driver()
    tokens = prompt(0, 2)
    request = driver.admit(tokens)
    driver.prefill(request)
    driver.decode(request, [5, 6], body=pages(1, 0, 0))
    getattr(driver, ending)(request)
    ((_, metadata),) = path_of(driver, tokens)
    assert metadata.importance.body_mass() == pytest.approx([1, 0])


def test_a_retracted_request_stays_one_query_and_one_access(make_driver):
    driver = make_driver()
    document = prompt(0, 2)
    serve(driver, document)
    request = driver.admit(document + prompt(100, 1))
    driver.prefill(request, body=pages(1, 1, 0))
    driver.retract(request)
    driver.readmit(request)
    driver.prefill(request, body=pages(1, 1, 0))
    driver.decode(request, [5], body=pages(1, 1, 0, 0))
    driver.finish(request)
    ((_, metadata),) = path_of(driver, document)
    assert metadata.importance.queries == 1
    assert metadata.importance.weight(Origin.CROSS).max() <= 1.0
    assert metadata.accesses == 1
    assert driver.component.state.counters.requests == 2


def test_a_request_that_is_aborted_behind_its_retraction_leaves_the_shadows(make_driver):
    driver = make_driver("observe")
    pair = ShadowPair(256 // PAGE, PAGE, driver.component.state.policy.cost, 256)
    shadowing = shadowed(driver.component, pair)
    waiting, aborted = (driver.admit(prompt(1000 * number, 3)) for number in (1, 2))
    for request in (waiting, aborted):
        driver.prefill(request)
        driver.retract(request)
    for rid in (aborted.rid, "never admitted"):
        driver.cache.finish(CacheRequestHandle(rid, 0), CacheRequestOutcome.ABORT)
    settle(shadowing)
    for cache in (pair.lru, pair.importance):
        cache.check_integrity()
        cache.evict(10**6)
        assert cache.used == 3, "what still waits is held"
    driver.readmit(waiting)
    driver.prefill(waiting)
    driver.finish(waiting)
    settle(shadowing)
    for cache in (pair.lru, pair.importance):
        cache.evict(10**6)
        assert cache.used == 0
    assert not shadowing._retracted


@pytest.mark.parametrize("giving_up", ["no room", "in the queue of a decode server"])
def test_a_request_that_is_given_up_unfinished_leaves_the_shadows(make_driver, giving_up: str):
    driver = make_driver("observe")
    pair = ShadowPair(256 // PAGE, PAGE, driver.component.state.policy.cost, 256)
    shadowing = shadowed(driver.component, pair)
    request = driver.admit(prompt(0, 3))
    if giving_up == "no room":  # ``ScheduleBatch.retract_decode``, of the last one
        driver.prefill(request)
        request.to_finish = FINISH_ABORT("no room")
        driver.retract(request)
    else:  # ``Scheduler.abort_request``: it has been prefilled elsewhere
        request.filled = len(request.origin_input_ids)
        driver._extend(request, request.filled)
        driver.cache.finish(CacheRequestHandle(request.rid, 0), CacheRequestOutcome.ABORT)
        driver._release(request, insert=True)
    settle(shadowing)
    for cache in (pair.lru, pair.importance):
        cache.check_integrity()
        cache.evict(10**6)
        assert cache.used == 0, "nothing is locked"
    assert pair.comparison.requests == 1
    assert not shadowing._retracted


def test_a_given_up_request_says_nothing_of_the_next_retraction(make_driver):
    driver = make_driver("observe")
    pair = ShadowPair(256 // PAGE, PAGE, driver.component.state.policy.cost, 256)
    shadowing = shadowed(driver.component, pair)
    driver.cache.finish(CacheRequestHandle("1", 0), CacheRequestOutcome.ABORT)
    serve(driver, prompt(1000, 3))
    request = driver.admit(prompt(0, 3))
    request.rid = "1"
    driver.prefill(request)
    driver.retract(request)
    assert shadowing._retracted == {"1"}


@pytest.mark.parametrize("learns", [True, False])
def test_a_decode_server_says_what_it_had_itself(make_driver, learns: bool):
    """Its requests come with the hits of the server that computed their prompts."""
    driver = make_driver("observe")
    component = driver.component
    component.requests.admissions.is_decode_server = True
    pair = ShadowPair(256 // PAGE, PAGE, component.state.policy.cost, 256)
    shadowing = shadowed(component, pair)
    document = prompt(0, 2)
    serve(driver, document)
    if not learns:
        component.state.faults.learn(FaultPlace.RANKING, lambda: 1 / 0)
    request = driver.admit(document + prompt(100, 2))
    request.cached_tokens_device, request.cached_tokens_host, request.cached_tokens_storage = PAGE, PAGE, PAGE
    driver.prefill(request)
    driver.decode(request, [7])
    driver.finish(request)
    own = {Tier.DEVICE: 2 * PAGE, Tier.HOST: 0, Tier.STORAGE: 0}
    assert found_tokens(request) == own
    counters = component.state.counters
    assert counters.hit_tokens == own
    assert counters.hit_requests == {Tier.DEVICE: 1, Tier.HOST: 0, Tier.STORAGE: 0}
    settle(shadowing)
    if learns:
        assert shadowing.document()["server_hit_tokens"] == 2 * PAGE
        assert component.misses.recent[-1].account.found == own


@pytest.mark.parametrize("ending", ["finished", "aborted"])
@pytest.mark.parametrize("learns", [True, False])
def test_a_beam_search_visits_what_it_finds_and_leaves_nothing(make_driver, ending: str, learns: bool):
    """sglang puts nothing of it into the tree."""
    driver = make_driver()
    document, rest = prompt(0, 2), prompt(100, 2)
    serve(driver, document)
    if not learns:
        driver.component.state.faults.learn(FaultPlace.RANKING, lambda: 1 / 0)
    request = driver.admit(document + rest)
    request.skip_radix_cache_insert = True
    driver._extend(request, len(document + rest))
    if ending == "aborted":
        request.finished_reason = FINISH_ABORT()
    driver.abort(request)
    counters = driver.component.state.counters
    assert (counters.requests, counters.hit_tokens[Tier.DEVICE]) == (2, len(document))
    assert driver.cache.evictable_size() == len(document)
    if learns:
        ((_, metadata),) = path_of(driver, document)
        assert metadata.accesses == 1
        again = serve(driver, document + rest + [5])
        (not_kept,) = (
            part for part in record_of(again).misses.account.parts if part.reason is Reason.NOT_KEPT
        )
        assert not_kept.fate.cause is (Cause.BEAMS if ending == "finished" else Cause.ABORT)


def test_matches_of_waiting_requests_are_no_accesses(make_driver):
    driver = make_driver()
    document = prompt(0, 2)
    serve(driver, document)
    for _ in range(5):
        path_of(driver, document)
    ((_, metadata),) = path_of(driver, document)
    assert metadata.accesses == 0
    assert driver.component.state.policy.clock == 1


def test_page_vectors_survive_demotion_and_load_back(make_driver):
    driver = make_driver()
    tokens = prompt(0, 3)
    serve(driver, tokens, prefill=pages(1, 2, 1))
    ((node, metadata),) = path_of(driver, tokens)
    before = metadata.importance.page_vectors()
    driver.back_up(node.id)
    driver.evict(driver.cache.evictable_size())
    assert node.evicted
    assert node.backuped
    assert np.array_equal(driver.component.state.tree.metadata(node).importance.page_vectors(), before)
    ((loaded, metadata),) = path_of(driver, tokens)
    assert loaded is node
    assert not node.evicted
    assert np.array_equal(metadata.importance.page_vectors(), before)


def test_an_evicted_prefix_that_returns_gets_its_history_back(make_driver):
    driver = make_driver()
    document = prompt(0, 2)
    for question in (100, 200, 300):
        serve(driver, document + prompt(question, 1), prefill=pages(1, 3, 0))
    ((_, metadata),) = path_of(driver, document)
    known = metadata.importance.body_mass(Origin.CROSS)
    driver.evict(10_000)
    assert not list(driver.component.state.tree.nodes())
    serve(driver, document)
    ((_, metadata),) = path_of(driver, document)
    assert metadata.importance.body_mass(Origin.CROSS) == pytest.approx(known)


def test_flush_forgets_nodes_and_ghosts(make_driver):
    driver = make_driver()
    serve(driver, prompt(0, 2), prefill=pages(1, 1))
    driver.cache.reset()
    driver.component.check_integrity()
    assert not list(driver.component.state.tree.nodes())
    assert len(driver.component.state.tree.ghosts) == 0


def important_and_recent(driver: TreeDriver) -> tuple[list[int], list[int]]:
    """An old document that two queries found important, and a younger one that nobody looked at."""
    important, recent = prompt(0, 2), prompt(1000, 2)
    for question in (100, 200, 300):
        serve(driver, important + prompt(question, 2), prefill=pages(4, 4, 0.1, 0.1))
    driver.evict(6 * PAGE)  # the questions, which lie deeper than the document
    for question in (400, 500, 600):
        serve(driver, recent + prompt(question, 2), prefill=pages(0.1, 0.1, 4, 4))
    reader = driver.admit(important + prompt(999, 1))  # holds the document while the questions go
    driver.evict(6 * PAGE)
    driver.abort(reader)
    return important, recent


@pytest.mark.parametrize(("g", "victim"), [("on", "recent"), ("off", "important")])
def test_importance_decides_who_is_evicted_and_g_off_is_the_control(make_driver, g: str, victim: str):
    driver = make_driver(options=ImportanceOptions.of({"policy": "importance", "signal.g": g}))
    important, recent = important_and_recent(driver)
    names = {important[0]: "important", recent[0]: "recent"}
    remaining = {names[node.key.token_ids[0]] for node in driver.component.state.tree.nodes()}
    assert remaining == {"important", "recent"}
    driver.evict(1)
    (survivor,) = (names[node.key.token_ids[0]] for node in driver.component.state.tree.nodes())
    assert survivor != victim


def test_observe_keeps_stock_s_victims(make_driver):
    observed, stock = make_driver("observe", tokens=128), TreeDriver("python-lru", tokens=128)
    for driver in (stock, observed):
        for start in range(0, 3000, 100):
            serve(driver, prompt(start % 700, 4))
            serve(driver, prompt(5000, 4))
    survivors = [
        sorted(tuple(node.key.token_ids) for node in driver.all_nodes()) for driver in (stock, observed)
    ]
    assert survivors[0] == survivors[1]
    assert observed.component.state.counters.evicted_from(Tier.DEVICE) > 0


def test_different_salts_share_neither_nodes_nor_ghosts(make_driver):
    driver = make_driver()
    tokens = prompt(0, 2)
    serve(driver, tokens, prefill=pages(1, 1))
    ((node, _),) = path_of(driver, tokens)
    digests = driver.component.state.tree.page_digests(node)
    salted = driver.admit(tokens)
    driver.abort(salted)
    request = driver.admit([9, 9])
    driver.abort(request)
    salted.cache_salt = "tenant"
    driver.readmit(salted)
    driver.prefill(salted, body=pages(1, 1))
    driver.finish(salted)
    other = next(n for n in driver.component.state.tree.nodes() if n.key.cache_salt == "tenant")
    assert not set(digests) & set(driver.component.state.tree.page_digests(other))


def test_a_host_copy_makes_a_leaf_the_next_victim(make_driver):
    driver = make_driver()
    older, younger = prompt(0, 2), prompt(1000, 2)
    serve(driver, older)
    serve(driver, younger)
    ((node, _),) = path_of(driver, younger)
    driver.back_up(node.id)
    driver.evict(1)
    assert node.evicted, "restoring it costs a copy, restoring the older one a prefill"


def test_a_victim_that_upstream_could_not_evict_is_ranked_again(make_driver):
    driver = make_driver()
    serve(driver, prompt(0, 2))
    component = driver.component
    component.evict_device_start(1)
    collected = len(signature(component.evict_device_next_node).parameters) - 1  # differs between releases
    victim = component.evict_device_next_node({component.component_type: 0}, *({} for _ in range(collected)))
    assert victim is not None
    driver.evict_host(1)  # as a backup does that finds the host full
    component.evict_device_end()
    component.check_integrity()
    driver.evict(1)
    assert not list(component.state.tree.nodes())


def test_a_leaf_that_ghosts_know_brings_its_body_mass_before_anything_is_folded(make_driver):
    driver = make_driver()
    tokens = prompt(0, 3)
    serve(driver, tokens, prefill=pages(1, 2, 1))
    driver.evict(len(tokens) + PAGE)
    assert driver.component.body_mass.total == 0
    driver.prefill(driver.admit(tokens))
    assert driver.component.body_mass.total > 0
    driver.component.body_mass.check_integrity()

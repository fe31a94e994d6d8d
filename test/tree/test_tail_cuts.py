"""Victims that go from their tails: what stays is found, known and ranked as the whole was."""

from __future__ import annotations

import pytest

import sglang_importance.tree.annotated_tree as annotated_tree
from sgl_importance.nodes import tail_size
from sgl_importance.nodes.tail_size import LEAST_TOKENS, tail_pages
from sgl_importance.observe.trace.records import EventKind
from sgl_importance.reuse.reuse_class import Transition

from support.drivers.hosted_driver import HostedDriver
from support.drivers.tree_driver import PAGE, TreeDriver
from support.drivers.tree_requests import path_of, prompt, serve

PAGES = 8


@pytest.fixture(autouse=True)
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_size, "LEAST_TOKENS", PAGE)


def cached(driver: TreeDriver) -> list[int]:
    """Pages of the nodes on the path of ``prompt(0, PAGES)``."""
    return [len(node.key) // PAGE for node, _ in path_of(driver, prompt(0, PAGES))]


@pytest.mark.parametrize(
    ("asked", "tokens", "pages"), [(1, 4096, 64), (600, 1024, 38), (1, 512, 16), (300, 200, 19)]
)
def test_a_tail_is_what_is_asked_or_a_quarter_or_the_least_in_whole_pages(
    monkeypatch: pytest.MonkeyPatch, asked: int, tokens: int, pages: int
) -> None:
    monkeypatch.setattr(tail_size, "LEAST_TOKENS", LEAST_TOKENS)
    assert tail_pages(asked, tokens, 16) == pages


def test_the_front_stays_with_the_recency_and_the_class_of_the_whole(make_driver) -> None:
    driver = make_driver()
    serve(driver, prompt(0, PAGES))
    (whole,) = driver.all_nodes()
    known = driver.component.state.tree.metadata(whole)
    before = whole.last_access_time, known.reuse_class, known.last_access, known.is_tip
    assert driver.evict(1) == 2 * PAGE
    (front,) = driver.all_nodes()
    left = driver.component.state.tree.metadata(front)
    assert len(front.key) == 6 * PAGE
    assert (front.last_access_time, left.reuse_class, left.last_access, left.is_tip) == before
    splits = [
        (event.node, event.reason)
        for _, event in driver.component.state.events.since(0, 100)
        if event.kind is EventKind.SPLIT
    ]
    assert splits == [(front.id, "tail_cut")]
    driver.component.check_integrity()


def test_the_life_of_a_node_is_evidence_once(make_driver) -> None:
    """Cut twice, and asked for again in full: one end of one interval, as of a node that was never cut."""
    hits = []
    for evicted in (0, 1):
        driver = make_driver()
        serve(driver, prompt(0, PAGES))
        for _ in range(2 * evicted):
            driver.evict(evicted)
        assert len(cached(driver)) == 1
        serve(driver, prompt(0, PAGES))
        ended, _ = driver.component.state.policy.reuse.counts()
        hits.append(float(ended.sum()))
    assert hits == [1.0, 1.0]


def test_a_conversation_goes_on_from_what_is_left(make_driver) -> None:
    driver = make_driver()
    serve(driver, prompt(0, PAGES))
    driver.evict(1)
    request = driver.admit(prompt(0, PAGES) + prompt(900, 2))
    assert request.cached_tokens_device == 6 * PAGE
    driver.prefill(request)
    (_, tail) = path_of(driver, prompt(0, PAGES))[-1]
    assert tail.transition is Transition.NEXT_TURN
    driver.finish(request)
    driver.component.check_integrity()


def test_pages_are_hashed_once_however_often_a_node_is_cut(
    make_driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver()
    serve(driver, prompt(0, PAGES))
    hashed = []
    chain = annotated_tree.iterate_chain

    def counting(*args, **kwargs):
        for digest in chain(*args, **kwargs):
            hashed.append(digest)
            yield digest

    monkeypatch.setattr(annotated_tree, "iterate_chain", counting)
    cuts = 0
    while list(driver.all_nodes()):
        driver.evict(1)
        cuts += 1
    assert cuts > 4
    assert len(hashed) == PAGES
    monkeypatch.undo()
    expected = list(driver.component.state.tree.ghosts._pages)
    assert sorted(hashed) == sorted(expected), "each page has a ghost of its own name"


def test_parts_that_are_cut_again_by_a_prompt_keep_the_names_of_their_pages(make_driver) -> None:
    driver = make_driver()
    serve(driver, prompt(0, PAGES))
    driver.evict(1)
    serve(driver, prompt(0, 2) + prompt(700, 2))
    tree = driver.component.state.tree
    for node in driver.all_nodes():
        assert tree.page_digests(node) == list(tree.iterate_pages(node))


def _locked_on_the_host(driver: TreeDriver, node) -> None:
    node.component_data[driver.component.component_type].host_lock_ref = 1


def _on_its_way_to_the_host(driver: TreeDriver, node) -> None:
    node.write_through_pending_id = 7


def _loading(driver: TreeDriver, node) -> None:
    node.load_back_pending_id = 7


def _waiting_in_a_buffer(driver: TreeDriver, node) -> None:
    driver.core.is_host_memory_buffer_only = True


def _with_states(driver: TreeDriver, node) -> None:
    driver.core.components = [*driver.core.components, driver.component]


def _expendable(driver: TreeDriver, node) -> None:
    driver.component.state.tree.metadata(node).expendable = True


@pytest.mark.parametrize(
    "made",
    [
        _locked_on_the_host,
        _on_its_way_to_the_host,
        _loading,
        _waiting_in_a_buffer,
        _with_states,
        _expendable,
    ],
)
def test_what_upstream_cannot_split_safely_goes_whole(make_driver, made) -> None:
    driver = make_driver()
    serve(driver, prompt(0, PAGES))
    (node,) = driver.all_nodes()
    made(driver, node)
    driver.component._tails.cut(node, 1)
    assert len(node.key) == PAGES * PAGE
    assert list(driver.all_nodes()) == [node]


def test_of_two_copies_under_write_back_neither_is_cut() -> None:
    driver = HostedDriver(write_policy="write_back")
    serve(driver, prompt(0, PAGES))
    driver.evict(PAGES * PAGE)
    driver.settle()
    serve(driver, prompt(0, PAGES) + prompt(900, 1))
    driver.settle()
    node = next(each for each in driver.all_nodes() if each.backuped and not each.evicted)
    tokens = len(node.key)
    driver.component._tails.cut(node, 1)
    assert len(node.key) == tokens


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_a_host_gives_tails_up_too_and_what_is_left_is_loaded_with_its_content(write_policy: str) -> None:
    driver = HostedDriver(write_policy=write_policy)
    tokens = prompt(0, PAGES)
    serve(driver, tokens)
    driver.settle()
    driver.evict(1)
    driver.settle()
    assert sorted((len(node.key) // PAGE, node.evicted) for node in driver.all_nodes()) == [
        (2, True),
        (6, False),
    ]
    driver.evict(PAGES * PAGE)
    driver.settle()
    driver.evict_host(1)
    pages = sorted(len(node.key) // PAGE for node in driver.all_nodes())
    assert sum(pages) == PAGES - 1
    request = driver.admit([*tokens, 1])
    assert request.cached_tokens_host == (PAGES - 1) * PAGE
    assert driver.checked_tokens >= request.cached_tokens_host
    driver.prefill(request)
    driver.finish(request)
    driver.settle()
    driver.component.check_integrity()


def test_chosen_nodes_go_whole(make_driver) -> None:
    driver = make_driver()
    serve(driver, prompt(0, PAGES))
    (node,) = driver.all_nodes()
    with driver.component.evicting_only([node]):
        driver.evict(1)
    assert not list(driver.all_nodes())


def test_observe_evicts_whole_leaves_as_upstream_does(make_driver) -> None:
    driver = make_driver("observe")
    serve(driver, prompt(0, PAGES))
    driver.evict(1)
    assert not list(driver.all_nodes())


def test_a_leaf_falls_into_few_parts_on_the_host() -> None:
    """A quarter goes at least: what only the host has of 64 pages are no 64 nodes."""
    driver = HostedDriver(write_policy="write_through")
    serve(driver, prompt(0, 64))
    driver.settle()
    while any(not node.evicted for node in driver.all_nodes()):
        driver.evict(1)
        driver.settle()
    assert 3 < len(list(driver.all_nodes())) <= 14

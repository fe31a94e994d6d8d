"""Copies to host and storage on the real tree: what is dropped gets none, and nothing is out of reach."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.kv_hints import decode_kv_hints_envelope

from sgl_importance.placement.hints.hints import Hints
from sgl_importance.tiers import Tier

from support.doubles.lower_tiers import LowerTiers
from support.drivers.tiered_driver import HOST, POOL, tiered
from support.drivers.tree_driver import PAGE, TreeDriver
from support.drivers.tree_requests import prompt, serve
from support.nightly_cases import rest_nightly

WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")


def check(driver: TreeDriver) -> None:
    """Upstream's books, and what it does not check under write_back: that nothing is out of reach."""
    driver.cache.sanity_check()
    for node in driver.all_nodes():
        assert not node.evicted or node.backuped, "a node without any copy"
        parent = node.parent
        if parent is not driver.core.root_node:
            assert parent.backuped or not parent.evicted, "an orphan on the host"
            if not driver.core.is_write_back:
                assert parent.backuped or not node.backuped


def host_tokens(driver: TreeDriver) -> int:
    return sum(len(node.key) for node in driver.all_nodes() if node.backuped)


def in_storage(driver: TreeDriver) -> int:
    """Tokens of nodes that count as stored."""
    tree = driver.component.state.tree
    return sum(len(node.key) for node in driver.all_nodes() if tree.metadata(node).in_storage)


def serve_once(driver: TreeDriver, tokens: list[int]) -> None:
    """A request after which nobody asks for its prompt again, as it says."""
    request = driver.admit(tokens)
    request.kv_hints = decode_kv_hints_envelope(Hints.parse({"drop_after_use": True}).envelope())
    driver.prefill(request)
    driver.finish(request)


def test_write_through_copies_every_new_node_to_host_and_storage():
    driver, tiers = tiered("write_through")
    serve(driver, prompt(0, 4))
    tiers.settle(driver.cache)
    assert host_tokens(driver) == 4 * PAGE
    assert [len(tokens) for tokens in tiers.stored] == [4 * PAGE]
    check(driver)


def test_what_a_full_disk_did_not_take_does_not_count_as_stored():
    driver, tiers = tiered("write_through")
    written = driver.component.state.counters.written_tokens
    tiers.is_full = True
    serve(driver, prompt(0, 4))
    tiers.settle(driver.cache)
    assert (in_storage(driver), written[Tier.STORAGE]) == (0, 0)
    check(driver)
    tiers.is_full = False
    serve(driver, prompt(500, 6))
    tiers.settle(driver.cache)
    assert [len(tokens) for tokens in tiers.stored] == [6 * PAGE]
    assert in_storage(driver) == written[Tier.STORAGE] == 6 * PAGE


def test_a_failed_write_is_that_of_all_parts_of_a_node_and_of_what_follows():
    driver, tiers = tiered("write_through", pool=2 * POOL)
    serve(driver, prompt(0, 4))
    tiers.start_writing()
    driver.cache.writing_check(finish_count=len(tiers.ack_write_queue))  # handed over, no answer yet
    tiers.is_full = True
    tiers.fail_started()
    serve(driver, prompt(0, 2) + prompt(500, 2))  # cuts the node
    assert in_storage(driver) > 0
    tiers.settle(driver.cache)
    assert in_storage(driver) == 0
    check(driver)


@pytest.mark.parametrize("way", ["clear", "detach"])
def test_what_was_in_a_storage_that_was_emptied_is_in_none(way: str) -> None:
    """Nodes on the host count as lost with it again."""
    driver, tiers = tiered("write_through")
    answers = {"clear": False, "detach": (False, "busy")}
    attachment = SimpleNamespace(clear=lambda: answers["clear"], detach=lambda: answers["detach"])
    driver.cache._storage_attachment = attachment  # type: ignore[assignment]
    serve(driver, prompt(0, 4))
    tiers.settle(driver.cache)
    empty = getattr(driver.cache, f"{way}_storage_backend")
    assert empty() == answers[way]
    assert in_storage(driver) == 4 * PAGE
    answers |= {"clear": True, "detach": (True, "done")}
    assert empty() == answers[way]
    assert in_storage(driver) == 0
    check(driver)


def test_what_goes_after_use_is_not_copied_with_its_state():
    """Linear attention: upstream asks for a copy when the device gives up the state of an inner node."""
    driver, _ = tiered("write_back", storage=False)
    serve_once(driver, prompt(0, 4))
    (node,) = driver.all_nodes()
    assert not driver.cache.backup_node_for_write_back(node.id)
    assert host_tokens(driver) == 0
    serve(driver, prompt(0, 6))  # somebody wants it after all
    assert driver.cache.backup_node_for_write_back(node.id)
    assert host_tokens(driver) == 4 * PAGE
    check(driver)


def test_what_goes_after_use_is_kept_where_the_host_holds_what_follows():
    """Its child on the host would be an orphan."""
    driver, _ = tiered("write_back", storage=False)
    serve(driver, prompt(0, 2))
    serve(driver, prompt(0, 4))
    parent, child = driver.all_nodes()
    driver.evict(2 * PAGE)
    assert child.backuped
    assert not parent.backuped
    driver.component.state.tree.metadata(parent).expendable = True
    driver.evict(2 * PAGE)
    assert host_tokens(driver) == 4 * PAGE
    check(driver)


operations = st.lists(
    st.tuples(
        st.sampled_from(("serve", "serve", "serve", "once", "settle", "evict", "evict_host", "reset")),
        st.integers(0, 2**16),
    ),
    min_size=5,
    max_size=60,
)


def apply(driver: TreeDriver, tiers: LowerTiers, op: str, value: int) -> None:
    if op in ("serve", "once"):
        document, pages, tail = value % 4, 1 + value // 4 % 6, value // 24 % 5
        tokens = prompt(1000 * document, pages) + [2 + value % 3] * (tail * PAGE)
        if len(driver.cache.ongoing_write_through) > 1:  # what is being copied is locked
            tiers.settle(driver.cache)
        (serve if op == "serve" else serve_once)(driver, [*tokens, 1])
    elif op == "settle":
        tiers.is_full = value % 3 == 0
        tiers.settle(driver.cache)
    elif op == "evict":
        driver.evict(1 + value % POOL)
    elif op == "evict_host":
        driver.cache.evict_host(1 + value % HOST)
    elif value % 5 == 0:
        tiers.settle(driver.cache)
        driver.cache.reset()
        driver.cache.token_to_kv_pool_allocator.clear()
        tiers.stored.clear()


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
@settings(max_examples=40, deadline=None)
@given(operations)
def test_any_history_leaves_a_tree_without_orphans(write_policy: str, history: list[tuple[str, int]]):
    driver, tiers = tiered(write_policy)
    for op, value in history:
        apply(driver, tiers, op, value)
        check(driver)
    tiers.settle(driver.cache)
    check(driver)
    assert tiers.mem_pool_host.available_size() + host_tokens(driver) == HOST


@pytest.mark.parametrize("write_policy", rest_nightly(WRITE_POLICIES))
def test_every_rank_copies_alike(write_policy: str):
    rng = random.Random(3)
    ops = ("serve", "serve", "once", "settle", "evict")
    history = [(rng.choice(ops), rng.randrange(2**16)) for _ in range(400)]
    runs = []
    for _ in range(2):
        driver, tiers = tiered(write_policy)
        for op, value in history:
            apply(driver, tiers, op, value)
        tiers.settle(driver.cache)
        check(driver)
        runs.append((tiers.stored, driver.component.state.counters.written_tokens))
    assert runs[0] == runs[1]
    stored, written = runs[0]
    assert 0 < written[Tier.STORAGE] == sum(map(len, stored)) <= written[Tier.HOST]

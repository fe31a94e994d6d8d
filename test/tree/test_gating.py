"""The gate on the real tree: whole chains, no orphans, upstream's write policies."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.kv_hints import decode_kv_hints_envelope

from sgl_importance.hints.hints import Hints
from sgl_importance.options import ImportanceOptions
from sgl_importance.ranking.write_gate import GateSettings
from sgl_importance.tiers import Tier

from support.doubles.lower_tiers import LowerTiers
from support.doubles.scripted_gate import HOST, POOL, ScriptedGate, gated
from support.drivers.tree_driver import PAGE, TreeDriver
from support.drivers.tree_requests import prompt, serve

WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")


def test_the_option_is_the_bar_of_storage():
    options = ImportanceOptions(policy="importance", gate="on", gate_payback=0.3)
    driver, _ = gated("write_through", options=options)
    gate = driver.component.backups.gate
    assert gate is not None
    assert gate.settings == GateSettings(storage_payback=0.3)


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


def test_write_through_offers_every_new_node_and_then_storage():
    gate = ScriptedGate()
    driver, tiers = gated("write_through", gate)
    serve(driver, prompt(0, 4))
    tiers.settle(driver.cache)
    assert [(tier, len(chain)) for tier, chain, _ in gate.asked] == [(Tier.HOST, 1), (Tier.STORAGE, 1)]
    assert host_tokens(driver) == 4 * PAGE
    assert [len(tokens) for tokens in tiers.stored] == [4 * PAGE]
    check(driver)


def in_storage(driver: TreeDriver) -> int:
    """Tokens of nodes that count as stored."""
    tree = driver.component.state.tree
    return sum(len(node.key) for node in driver.all_nodes() if tree.metadata(node).in_storage)


def test_what_a_full_disk_did_not_take_is_offered_again():
    driver, tiers = gated("write_through", ScriptedGate())
    written = driver.component.state.counters.written_tokens
    tiers.is_full = True
    serve(driver, prompt(0, 4))
    tiers.settle(driver.cache)
    assert (in_storage(driver), written[Tier.STORAGE]) == (0, 0)
    check(driver)
    tiers.is_full = False
    serve(driver, prompt(0, 6))
    tiers.settle(driver.cache)
    assert [len(tokens) for tokens in tiers.stored] == [4 * PAGE, 2 * PAGE]
    assert in_storage(driver) == written[Tier.STORAGE] == 6 * PAGE
    check_prefix_closed(driver)


def test_a_failed_write_is_that_of_all_parts_of_a_node_and_of_what_follows():
    driver, tiers = gated("write_through", ScriptedGate(), pool=2 * POOL)
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
    """Nodes on the host count as lost with it again, and are offered anew."""
    driver, tiers = gated("write_through", ScriptedGate())
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
    if way == "clear":
        serve(driver, prompt(0, 6))
        tiers.settle(driver.cache)
        assert [len(tokens) for tokens in tiers.stored] == [4 * PAGE, 4 * PAGE, 2 * PAGE]
        check_prefix_closed(driver)


def test_a_node_to_be_dropped_is_not_put_to_the_gate():
    gate = ScriptedGate()
    driver, tiers = gated("write_through", gate, storage=False)
    request = driver.admit(prompt(0, 4))
    request.kv_hints = decode_kv_hints_envelope(Hints.parse({"drop_after_use": True}).envelope())
    driver.prefill(request)
    driver.finish(request)
    tiers.settle(driver.cache)
    assert not gate.asked
    assert host_tokens(driver) == 0


def test_a_refused_node_is_offered_again_with_what_follows_it():
    gate = ScriptedGate(False, False)  # at prefill end and at finish
    driver, tiers = gated("write_through", gate, storage=False)
    serve(driver, prompt(0, 4))
    tiers.settle(driver.cache)
    assert host_tokens(driver) == 0
    gate.answers = [False, True]  # the known part alone, then the chain with the new part
    serve(driver, prompt(0, 6))
    tiers.settle(driver.cache)
    assert [len(chain) for _, chain, admitted in gate.asked if admitted] == [2]
    assert host_tokens(driver) == 6 * PAGE
    check(driver)
    counters = driver.component.state.counters
    assert counters.written_tokens[Tier.HOST] == 6 * PAGE
    refused = counters.refused_tokens[Tier.HOST, ScriptedGate.refusal]
    assert counters.offered_tokens[Tier.HOST] > refused > 0


def test_selective_waits_for_a_second_request():
    gate = ScriptedGate()
    driver, tiers = gated("write_through_selective", gate, storage=False)
    serve(driver, prompt(0, 4))  # upstream's own count is at two now
    tiers.settle(driver.cache)
    assert not gate.asked
    serve(driver, prompt(0, 4))
    tiers.settle(driver.cache)
    assert [tier for tier, _, _ in gate.asked] == [Tier.HOST]
    check(driver)


def test_selective_offers_what_comes_back_after_its_eviction():
    gate = ScriptedGate()
    driver, tiers = gated("write_through_selective", gate, storage=False)
    serve(driver, prompt(0, 4))
    driver.evict(POOL)
    assert not list(driver.all_nodes())
    serve(driver, prompt(0, 4))
    tiers.settle(driver.cache)
    assert [tier for tier, _, _ in gate.asked] == [Tier.HOST]
    assert host_tokens(driver) == 4 * PAGE
    check(driver)


def test_write_back_drops_what_the_gate_refuses_unless_the_host_holds_what_follows():
    gate = ScriptedGate(otherwise=False)
    driver, _ = gated("write_back", gate, storage=False)
    serve(driver, prompt(0, 4))
    driver.evict(4 * PAGE)
    assert not list(driver.all_nodes())
    serve(driver, prompt(0, 2))
    serve(driver, prompt(0, 4))
    gate.answers = [True]
    driver.evict(2 * PAGE)
    assert host_tokens(driver) == 2 * PAGE
    asked = len(gate.asked)
    driver.evict(2 * PAGE)
    assert len(gate.asked) == asked, "its child on the host would be an orphan"
    assert host_tokens(driver) == 4 * PAGE
    check(driver)


@pytest.mark.parametrize("has_gate", [False, True])
def test_what_goes_after_use_is_not_copied_with_its_state(has_gate: bool):
    """Linear attention: upstream asks for a copy when the device gives up the state of an inner node."""
    options = ImportanceOptions(policy="importance", gate="on" if has_gate else "off")
    driver, _ = gated("write_back", storage=False, options=options)
    request = driver.admit(prompt(0, 4))
    request.kv_hints = decode_kv_hints_envelope(Hints.parse({"drop_after_use": True}).envelope())
    driver.prefill(request)
    driver.finish(request)
    (node,) = driver.all_nodes()
    assert not driver.cache.backup_node_for_write_back(node.id)
    assert host_tokens(driver) == 0
    serve(driver, prompt(0, 6))  # somebody wants it after all
    assert driver.cache.backup_node_for_write_back(node.id)
    assert host_tokens(driver) == 4 * PAGE
    check(driver)


def test_the_gate_is_asked_about_a_copy_with_a_state():
    gate = ScriptedGate(False, True)
    driver, _ = gated("write_back", gate, storage=False)
    serve(driver, prompt(0, 4))
    (node,) = driver.all_nodes()
    assert [driver.cache.backup_node_for_write_back(node.id) for _ in range(2)] == [False, True]
    driver.cache.backup_node_for_write_back(node.id)
    assert [tier for tier, *_ in gate.asked] == [Tier.HOST, Tier.HOST], (
        "the copy that is there is none to ask for"
    )
    assert host_tokens(driver) == 4 * PAGE
    counters = driver.component.state.counters
    assert counters.offered_tokens[Tier.HOST] == 2 * 4 * PAGE
    check(driver)


def test_a_child_goes_to_storage_with_its_ancestors_or_not_at_all():
    gate = ScriptedGate(True, False)
    driver, tiers = gated("write_through", gate)
    serve(driver, prompt(0, 4))
    tiers.settle(driver.cache)
    assert not tiers.stored
    gate.otherwise = True
    gate.answers = [False, True, False]  # storage at finish, then the child's host copy, its storage
    serve(driver, prompt(0, 6))
    tiers.settle(driver.cache)
    first, second = list(driver.all_nodes())
    for node in (first, second):
        known = driver.component.state.tree.metadata(node)
        above = driver.component.state.tree.metadata(node.parent) if node.parent.parent is not None else None
        assert not known.in_storage or above is None or above.in_storage


def test_under_write_back_ancestors_follow_to_storage():
    gate = ScriptedGate()
    driver, tiers = gated("write_back", gate)
    serve(driver, prompt(0, 2))
    serve(driver, prompt(0, 4))
    driver.evict(2 * PAGE)
    tiers.settle(driver.cache)
    assert [len(tokens) for tokens in tiers.stored] == [2 * PAGE]
    check_prefix_closed(driver)
    gate.otherwise = False
    driver.evict(2 * PAGE)
    tiers.settle(driver.cache)
    assert [len(tokens) for tokens in tiers.stored] == [2 * PAGE, 2 * PAGE], (
        "what follows it is there already"
    )
    check_prefix_closed(driver)
    check(driver)


def test_under_write_back_ancestors_follow_what_only_storage_holds():
    gate = ScriptedGate()
    driver, tiers = gated("write_back", gate)
    serve(driver, prompt(0, 2))
    serve(driver, prompt(0, 4))
    driver.evict(2 * PAGE)
    tiers.settle(driver.cache)
    assert driver.cache.evict_host(2 * PAGE) == 2 * PAGE
    gate.otherwise = False
    driver.evict(2 * PAGE)
    tiers.settle(driver.cache)
    assert [len(tokens) for tokens in tiers.stored] == [2 * PAGE, 2 * PAGE], (
        "it is reached through its parent"
    )
    check(driver)


def test_what_the_host_gives_up_is_stored_first():
    driver, tiers = gated("write_through", ScriptedGate(True, False))  # to the host, not to storage yet
    gate = driver.component.backups.gate
    serve(driver, prompt(0, 4))
    tiers.settle(driver.cache)
    gate.answers = [True]  # the host copy of a second prompt
    gate.otherwise = False
    serve(driver, prompt(500, 4))
    tiers.settle(driver.cache)
    driver.evict(POOL)
    assert not tiers.stored
    gate.answers = [True]
    freed = driver.cache.evict_host(4 * PAGE)
    assert freed == 4 * PAGE, "the other prompt went instead"
    assert len(tiers.stored) == 1
    assert host_tokens(driver) == 4 * PAGE
    check(driver)
    tiers.settle(driver.cache)
    assert driver.cache.evict_host(4 * PAGE) == 4 * PAGE
    assert not list(driver.all_nodes())
    assert len(tiers.stored) == 1
    check(driver)


def test_eviction_goes_on_where_everything_would_be_stored_first():
    driver, tiers = gated("write_through", ScriptedGate(), pool=HOST)
    driver.component.backups.gate.answers = [tier % 2 == 0 for tier in range(24)]
    for start in range(0, 6 * 1000, 1000):
        serve(driver, prompt(start, 4))
        tiers.settle(driver.cache)
    driver.evict(HOST)
    driver.component.backups.gate.answers = []
    held = host_tokens(driver)
    assert driver.cache.evict_host(held) >= held * 3 // 4
    check(driver)


operations = st.lists(
    st.tuples(
        st.sampled_from(("serve", "serve", "serve", "settle", "evict", "evict_host", "reset")),
        st.integers(0, 2**16),
    ),
    min_size=5,
    max_size=60,
)


def apply(driver: TreeDriver, tiers: LowerTiers, op: str, value: int) -> None:
    if op == "serve":
        document, pages, tail = value % 4, 1 + value // 4 % 6, value // 24 % 5
        tokens = prompt(1000 * document, pages) + [2 + value % 3] * (tail * PAGE)
        if len(driver.cache.ongoing_write_through) > 1:  # what is being copied is locked
            tiers.settle(driver.cache)
        serve(driver, [*tokens, 1])
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


def check_prefix_closed(driver: TreeDriver) -> None:
    tree = driver.component.state.tree
    for node in driver.all_nodes():
        if tree.metadata(node).in_storage and node.parent.parent is not None:
            above = tree.metadata(node.parent)
            assert above.in_storage or (above.owed_to_storage and not node.parent.backuped), (
                "a storage hit would stop ahead of it"
            )


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
@settings(max_examples=40, deadline=None)
@given(operations, st.integers(0, 2**32))
def test_any_answers_leave_a_tree_without_orphans(
    write_policy: str, history: list[tuple[str, int]], seed: int
):
    coin = random.Random(seed)
    gate = ScriptedGate(*(coin.random() < 0.5 for _ in range(1000)))
    driver, tiers = gated(write_policy, gate)
    for op, value in history:
        apply(driver, tiers, op, value)
        check(driver)
        check_prefix_closed(driver)
    tiers.settle(driver.cache)
    check(driver)
    assert tiers.mem_pool_host.available_size() + host_tokens(driver) == HOST


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
@pytest.mark.parametrize("disk", ["roomy", "full at times"])
def test_the_real_gate_decides_alike_on_every_rank(write_policy: str, disk: str):
    rng = random.Random(3)
    history = [(rng.choice(("serve", "serve", "settle", "evict")), rng.randrange(2**16)) for _ in range(400)]
    if disk == "roomy":
        history = [(op, 3 * value + 1 if op == "settle" else value) for op, value in history]
    runs = []
    for _ in range(2):
        driver, tiers = gated(write_policy)
        driver.component.backups.gate.settings = GateSettings(displacement=1.0)
        for op, value in history:
            apply(driver, tiers, op, value)
        tiers.settle(driver.cache)
        check(driver)
        check_prefix_closed(driver)
        counters = driver.component.state.counters
        runs.append((tiers.stored, counters.offered_tokens, counters.refused_tokens, counters.written_tokens))
    assert runs[0] == runs[1]
    stored, offered, refused, written = runs[0]
    refused_by_host = sum(tokens for (tier, _), tokens in refused.items() if tier is Tier.HOST)
    assert refused_by_host < offered[Tier.HOST]
    if write_policy != "write_through_selective":  # there everything on offer has come back before
        assert refused_by_host > 0
    assert 0 < written[Tier.STORAGE] == sum(map(len, stored))
    if disk == "roomy":  # else what is behind a write that was refused is written again
        assert written[Tier.STORAGE] <= written[Tier.HOST]

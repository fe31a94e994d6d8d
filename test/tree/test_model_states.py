"""States of linear attention on the real tree: what is a hit, which KV goes first, which states go."""

from __future__ import annotations

import inspect
from array import array
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertResult
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import (
    CacheTransferPhase,
    ComponentType,
    EvictLayer,
    MambaComponent,
)
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sgl_importance.nodes.ghosts import EvictionReason
from sgl_importance.reuse.reuse_class import Transition
from sgl_importance.tiers import Tier
from sglang_importance.tree.annotated_tree import AnnotatedTree
from sglang_importance.tree.insertion import Insertion
from sglang_importance.tree.model_states import lacks_state
from sglang_importance.tree.state_order import STATES_PER_WALK, StateOrder

from support.drivers.state_driver import StateDriver, state_config
from support.workloads.conversations import conversations


@pytest.fixture(autouse=True, scope="module")
def _config() -> Iterator[None]:
    with state_config():
        yield


def text(start: int, count: int) -> list[int]:
    return list(range(1000 * start, 1000 * start + count))


def hits(driver: StateDriver, seed: int) -> list[int]:
    found = [driver.serve(prompt, answer) for prompt, answer in conversations(seed)]
    driver.cache.sanity_check()
    return found


def tree_of(driver: StateDriver) -> AnnotatedTree:
    return driver.cache.importance.state.tree


def node_at(driver: StateDriver, depth: int):
    """The node that ends behind so many tokens of the only text so long."""
    tree = tree_of(driver)
    (found,) = (
        node for node in tree.nodes() if tree.metadata(node).depth + tree.metadata(node).tokens == depth
    )
    return found


def has_state(node) -> bool:
    return node.component_data[ComponentType.MAMBA].value is not None


@pytest.mark.parametrize("seed", range(4))
def test_importance_finds_more_than_lru_where_states_are_few(seed: int) -> None:
    few = {"tokens": 512, "states": 8}
    assert sum(hits(StateDriver("importance", **few), seed)) > sum(hits(StateDriver("rust-lru", **few), seed))


@pytest.mark.parametrize("extra_buffer", [False, True])
def test_observe_keeps_what_stock_keeps(extra_buffer: bool) -> None:
    sizes = {"tokens": 1024 if extra_buffer else 512, "states": 12, "extra_buffer": extra_buffer}
    stock = hits(StateDriver("rust-lru", **sizes), 1)
    assert any(stock)
    assert hits(StateDriver("observe", **sizes), 1) == stock


def test_kv_that_leads_to_no_state_goes_first() -> None:
    """Two texts share a prefix, at whose end there is no state; it outlives both, and is no hit."""
    driver = StateDriver("importance", tokens=512, states=16)
    prefix = text(1, 40)
    for question in (2, 3):
        assert driver.serve(prefix + text(question, 30), text(question + 10, 5)) == 0
    shared = node_at(driver, 40)
    assert not lacks_state(shared), "what follows has states"
    while shared.children:
        driver.cache.evict(EvictParams(num_tokens=1))
    assert lacks_state(shared)
    for other in (4, 5):  # visited twice, and never as often as the prefix
        driver.serve(text(other, 60), text(other + 10, 5))
    left = driver.cache.token_to_kv_pool_allocator.available_size()
    driver.cache.evict(EvictParams(num_tokens=1))
    assert driver.cache.token_to_kv_pool_allocator.available_size() == left + 40
    assert shared not in tree_of(driver)


def test_a_pin_keeps_kv_without_a_state() -> None:
    driver = StateDriver("importance", tokens=512, states=16)
    prefix = text(1, 40)
    for question in (2, 3):
        driver.serve(prefix + text(question, 30), text(question + 10, 5))
    policy, metadata = driver.cache.importance.state.policy, tree_of(driver).metadata(node_at(driver, 40))
    metadata.lacks_state = True
    unpinned = policy.loss(Tier.DEVICE, metadata, below=None)
    metadata.pin_octaves = {Tier.DEVICE: 128.0}
    assert policy.loss(Tier.DEVICE, metadata, below=None) > 2**128 * unpinned


def test_states_that_requests_go_by_are_given_up_first() -> None:
    """Each request leaves two, behind its prompt and behind its answer; the next turn needs the second."""
    found = {}
    for kind in ("python-lru", "importance"):
        driver = StateDriver(kind, tokens=2048, states=16)
        sessions = [text(number, 50) for number in (1, 2)]
        for number, session in enumerate(sessions):
            answer = text(number + 5, 10)
            driver.serve(session, answer)
            session += answer
        assert driver.cache.evict(EvictParams(num_tokens=0, mamba_num=2)).mamba_num_evicted == 2
        found[kind] = [driver.serve(session + text(9, 10), text(8, 3)) for session in sessions]
        driver.cache.sanity_check()
    assert found == {"python-lru": [0, 60], "importance": [60, 60]}


def test_the_state_where_texts_part_stays() -> None:
    """Pages of 16, states at chunks of 64: the second question leaves one at the end of the document."""
    driver = StateDriver("importance", tokens=4096, states=24, extra_buffer=True)
    document = text(1, 256)
    found = [driver.serve(document + text(question, 70), text(question + 10, 5)) for question in (2, 3, 4, 5)]
    assert found == [0, 0, 256, 256]
    (parting,) = (node for node in tree_of(driver).nodes() if len(node.children) > 1)
    held = sum(has_state(node) for node in tree_of(driver).nodes())
    driver.cache.evict(EvictParams(num_tokens=0, mamba_num=held - 1))
    assert has_state(parting)
    assert driver.serve(document + text(6, 70), text(16, 5)) == 256


def test_leaves_that_go_for_their_state_are_ours() -> None:
    driver = StateDriver("importance", tokens=2048, states=16)
    driver.serve(text(1, 50), text(2, 10))
    assert driver.cache.evict(EvictParams(num_tokens=0, mamba_num=2)).mamba_num_evicted == 2
    counted = driver.cache.importance.state.counters.evicted_tokens
    assert {kind: tokens for kind, tokens in counted.items() if tokens} == {
        (Tier.DEVICE, EvictionReason.LEAST_LOSS): 10
    }


def test_upstream_goes_on_where_our_order_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = StateDriver("importance", tokens=2048, states=16)
    for number in range(3):
        driver.serve(text(number, 50), text(number + 10, 10))
    held = driver.cache.tree_core.mamba_evictable_size()
    asked = []

    def fail(order: StateOrder) -> None:
        asked.append(order)
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(StateOrder, "next", fail)
    evicted = driver.cache.evict(EvictParams(num_tokens=0, mamba_num=held)).mamba_num_evicted
    assert (len(asked), evicted) == (1, held)
    assert not driver.cache.importance.state.faults.is_learning
    driver.serve(text(5, 50), text(15, 10))


def test_a_walk_ranks_no_more_where_there_are_many_states(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = StateDriver("importance", tokens=8192, states=150)
    for number in range(70):
        driver.serve(text(number, 50), text(number + 100, 10))
    held = driver.cache.tree_core.mamba_evictable_size()
    assert held > 2 * STATES_PER_WALK
    driver.cache.evict(EvictParams(num_tokens=0, mamba_num=1))  # the first walk may rank all
    ranked: list[int] = []
    item = StateOrder._item
    monkeypatch.setattr(StateOrder, "_item", lambda order, node: ranked.append(node.id) or item(order, node))
    evict = partial(driver.cache.evict, EvictParams(num_tokens=0, mamba_num=1))
    for _ in range(20):
        ranked.clear()
        assert evict().mamba_num_evicted == 1
        assert len(ranked) <= STATES_PER_WALK + 2, "and what comes up, once or twice"
    seen: set[int] = set()
    left = set(driver.cache.tree_core.lru_lists[ComponentType.MAMBA].cache)
    for _ in range(2 * -(-held // STATES_PER_WALK)):
        ranked.clear()
        evict()
        seen.update(ranked)
    left &= set(driver.cache.tree_core.lru_lists[ComponentType.MAMBA].cache)
    assert left <= seen, "each state has its turn"
    rest = driver.cache.tree_core.mamba_evictable_size()
    assert driver.cache.evict(EvictParams(num_tokens=0, mamba_num=rest)).mamba_num_evicted == rest
    assert driver.cache.tree_core.mamba_evictable_size() == 0


def test_a_walk_ranks_no_more_where_all_losses_have_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = StateDriver("importance", tokens=8192, states=150)
    for number in range(70):
        driver.serve(text(number, 50), text(number + 100, 10))
    evict = partial(driver.cache.evict, EvictParams(num_tokens=0, mamba_num=1))
    for _ in range(3):
        evict()
    held = driver.cache.tree_core.mamba_evictable_size()
    assert held > 2 * STATES_PER_WALK
    ranked: list[int] = []
    item = StateOrder._item

    def grown(order: StateOrder, node: UnifiedTreeNode) -> tuple[float, int, int]:
        ranked.append(node.id)
        loss, last_access, number = item(order, node)
        return loss + 1, last_access, number

    monkeypatch.setattr(StateOrder, "_item", grown)
    assert evict().mamba_num_evicted == 1
    assert len(ranked) == 2 * STATES_PER_WALK
    assert driver.cache.evict(EvictParams(num_tokens=0, mamba_num=held)).mamba_num_evicted == held - 1


def test_kv_is_ranked_again_when_the_state_below_it_on_the_host_goes() -> None:
    """No host tier: the node that it would hold is put into the tree by hand."""
    driver = StateDriver("importance", tokens=512, states=16)
    prefix = text(1, 40)
    for question in (2, 3):
        driver.serve(prefix + text(question, 30), text(question + 10, 5))
    shared = node_at(driver, 40)
    while shared.children:
        driver.cache.evict(EvictParams(num_tokens=1))
    below = UnifiedTreeNode(shared.component_types)
    below.parent, shared.children["host"] = shared, below
    below.component_data[ComponentType.MAMBA].host_value = torch.tensor([0])
    leaves = driver.cache.components[ComponentType.FULL].leaves
    leaves.host_state_changed(below)
    metadata = tree_of(driver).metadata(shared)
    assert not metadata.lacks_state
    driver.serve(text(4, 60), text(14, 5))

    states = driver.cache.components[ComponentType.MAMBA]
    lists = {"device_frees": defaultdict(list), "host_frees": defaultdict(list), "cache_actions": []}
    taken = inspect.signature(MambaComponent.evict_component).parameters
    wanted = {name: value for name, value in lists.items() if name in taken}
    assert states.evict_component(below, target=EvictLayer.HOST, **wanted) == (0, 1)
    assert metadata.lacks_state
    del shared.children["host"]
    driver.cache.evict(EvictParams(num_tokens=1))
    assert shared not in tree_of(driver)


def test_kv_on_the_host_is_ranked_again_when_storage_brings_its_state() -> None:
    """No host tier: its leaves are put into the tree by hand."""
    driver = StateDriver("importance", tokens=512, states=16)
    driver.serve(text(1, 40), text(11, 5))
    core, component = driver.cache.tree_core, driver.cache.importance
    anchor = node_at(driver, 40)
    first, second = (core._new_node() for _ in range(2))
    for number, leaf in enumerate((first, second), start=2):
        leaf.parent, leaf.key = anchor, RadixKey(array("q", text(number, 10)), None)
        anchor.children[leaf.key.child_key(1)] = leaf
        leaf.component_data[ComponentType.FULL].host_value = torch.arange(10)
        core.evictable_host_leaves.add(leaf)
    component.node_events.prefetched(Insertion(Transition.COLD))
    metadata = tree_of(driver).metadata(first)
    assert metadata.lacks_state
    states = driver.cache.components[ComponentType.MAMBA]
    states.commit_hicache_transfer(
        anchor,
        CacheTransferPhase.PREFETCH,
        [PoolTransfer(name=PoolName.MAMBA, host_indices=torch.tensor([0]))],
        cache_actions=[],
        insert_result=InsertResult(prefix_len=10, inserted_host_node=first.id),
        pool_storage_result=SimpleNamespace(extra_pool_hit_pages={PoolName.MAMBA: 1}),
    )
    assert first.component_data[ComponentType.MAMBA].host_value is not None
    assert not metadata.lacks_state
    assert component.state.policy.victim(Tier.HOST) == second.id


def test_a_walk_that_wants_more_than_there_is_ends() -> None:
    driver = StateDriver("importance", tokens=2048, states=16)
    driver.serve(text(1, 50), text(2, 10))
    assert driver.cache.evict(EvictParams(num_tokens=0, mamba_num=99)).mamba_num_evicted == 2
    assert driver.cache.tree_core.mamba_evictable_size() == 0


requests = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), min_size=5, max_size=30)


@pytest.mark.parametrize("extra_buffer", [False, True])
@settings(max_examples=25, deadline=None)
@given(asked=requests)
def test_the_state_that_goes_loses_least(extra_buffer: bool, asked: list[tuple[int, int, bool]]) -> None:
    """Against a walk over the whole tree, before each of many evictions of one state."""
    driver = StateDriver("importance", tokens=2048, states=20, extra_buffer=extra_buffer)
    tree = tree_of(driver)
    order = driver.cache.components[ComponentType.MAMBA].order
    sessions: dict[tuple[int, int], list[int]] = {}
    for serial, (document, speaker, evicts) in enumerate(asked):
        session = sessions.setdefault((document, speaker), text(document, 130))
        session += text(50 + serial, 70)
        answer = text(90 + serial, 20)
        if len(session) < 600:
            driver.serve(session, answer)
            session += answer
        driver.cache.sanity_check()
        for node in tree.nodes():
            if not node.children:
                assert lacks_state(node) == (not has_state(node))
        held = [node for node in tree.nodes() if has_state(node)]
        if not evicts or not held:
            continue
        losses = {node.id: order._item(node)[0] for node in held}
        driver.cache.evict(EvictParams(num_tokens=0, mamba_num=1))
        (gone,) = (node for node in held if not has_state(node))
        assert losses[gone.id] == min(losses.values())

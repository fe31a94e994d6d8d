"""``observe`` evicts in upstream's order without looking at every leaf."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.unified_cache.components import FullComponent

import sglang_importance.tree.recency_order as recency_order
from sgl_importance.tiers import Tier
from sglang_importance.cache.component import ImportanceComponent
from sglang_importance.tree.recency_order import RecencyOrder

from support.doubles.twins import Mutation, broken_twin
from support.drivers.history import OPERATIONS, History
from support.drivers.tree_driver import PAGE, TreeDriver

events = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 2**16), st.integers(0, 2**16)),
    min_size=10,
    max_size=80,
)


class Upstream:
    """Upstream's own walks beside ours over the same tree, victim by victim.

    Attributes:
        agreed: victims that both chose.
    """

    def __init__(self, component: ImportanceComponent) -> None:
        self.agreed = {Tier.DEVICE: 0, Tier.HOST: 0}
        self._component = component
        self._start, self._next = component._evict_device_start, component._evict_device_next_node
        self._host_walk, self._evict_host = (
            component.drive_host_eviction,
            component.tree_core._evict_host_leaf,
        )
        component._evict_device_start = self._device_walk
        component._evict_device_next_node = self._device_victim
        component.drive_host_eviction = self._walk_host
        component.tree_core._evict_host_leaf = self._host_victim
        self._candidates: list[Any] = []

    def _device_walk(self, request_cnt: int) -> None:
        FullComponent._evict_device_start(self._component, request_cnt)
        self._start(request_cnt)

    def _device_victim(self, *args: Any, **named: Any) -> int | None:
        theirs = FullComponent._evict_device_next_node(self._component, *args, **named)
        ours = self._next(*args, **named)
        assert ours == theirs
        self.agreed[Tier.DEVICE] += ours is not None
        return ours

    def _walk_host(self, *args: Any, **named: Any) -> None:
        self._candidates = list(self._component.tree_core.evictable_host_leaves)
        self._host_walk(*args, **named)

    def _host_victim(self, node: Any, *args: Any, **named: Any) -> None:
        leaves = self._component.tree_core.evictable_host_leaves
        candidates = [leaf for leaf in self._candidates if leaf in leaves]
        oldest = min(candidates, key=lambda leaf: leaf.last_access_time)
        assert node is oldest
        self._candidates.remove(node)
        parent = node.parent
        self._evict_host(node, *args, **named)
        if parent in leaves:
            self._candidates.append(parent)
        self.agreed[Tier.HOST] += 1


def followed(history: list[tuple[str, int, int]]) -> Upstream:
    with pytest.MonkeyPatch.context() as patch:
        tree = History("observe", patch)
        upstream = Upstream(tree.driver.component)
        for event in history:
            tree.apply(*event)
        tree.end()
        assert tree.driver.component.state.faults.is_learning
    return upstream


@settings(max_examples=60, deadline=None)
@given(events)
def test_the_victims_of_any_history_are_upstreams(history: list[tuple[str, int, int]]) -> None:
    followed(history)


def a_long_history(length: int = 1200) -> list[tuple[str, int, int]]:
    rng = random.Random(11)
    weights = [6, 8, 6, 4, 1, 1, 2, 1, 1, 2, 2, 1, 1, 1]
    operations = rng.choices(OPERATIONS, weights, k=length)
    return [(operation, rng.randrange(2**16), rng.randrange(2**16)) for operation in operations]


def test_a_long_history_evicts_from_both_tiers() -> None:
    agreed = followed(a_long_history()).agreed
    assert agreed[Tier.DEVICE] > 50
    assert agreed[Tier.HOST] > 5


TWINS = [
    Mutation("used_since", "if node.last_access_time > entered_at:", "if False:"),
    Mutation("without_parents", "if parent is not None and parent in self._leaves:", "if False:"),
    Mutation("leaf_no_more", "self._entered.pop(node.id, None)\n\n    def begin", "pass\n\n    def begin"),
]


@pytest.mark.parametrize("mutation", TWINS, ids=str)
def test_broken_orders_are_told_apart(
    mutation: Mutation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = broken_twin(recency_order, mutation, tmp_path)
    for method in ("next", "discard"):
        monkeypatch.setattr(RecencyOrder, method, getattr(twin.RecencyOrder, method))
    with pytest.raises(AssertionError):
        followed(a_long_history())


def test_a_walk_looks_at_its_victims_and_not_at_every_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    popped: list[Any] = []
    real: Callable[..., Any] = recency_order.heappop
    monkeypatch.setattr(recency_order, "heappop", lambda heap: popped.append(1) or real(heap))
    monkeypatch.setattr(FullComponent, "_evict_device_start", lambda *_: pytest.fail("a heap of all leaves"))
    driver = TreeDriver("observe", tokens=400 * PAGE)
    for serial in range(300):
        request = driver.admit([serial] * PAGE)
        driver.prefill(request)
        driver.finish(request)
    assert len(driver.core.evictable_device_leaves) == 300
    driver.evict(3 * PAGE)
    assert len(driver.core.evictable_device_leaves) == 297
    assert len(popped) < 30, "three victims of 300 leaves, and those used since they were entered"

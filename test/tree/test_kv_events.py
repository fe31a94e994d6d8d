"""The KV events of our tree: what stock publishes, and what a router can keep a mirror by."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.tiers import Tier

from support.drivers.history import OPERATIONS, History
from support.drivers.tree_driver import PAGE, TreeDriver
from support.kv_event_mirror import EventMirror, Prefix
from support.nightly_cases import rest_nightly

events = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 2**16), st.integers(0, 2**16)),
    min_size=10,
    max_size=80,
)


def pages_of_tree(driver: TreeDriver) -> dict[Tier, set[Prefix]]:
    held: dict[Tier, set[Prefix]] = {Tier.DEVICE: set(), Tier.HOST: set()}
    below: list[tuple[Any, Prefix]] = [(driver.core.root_node, ())]
    while below:
        parent, prefix = below.pop()
        for node in parent.children.values():
            whole = (*prefix, *node.key.token_ids)
            below.append((node, whole))
            ends = range(len(prefix) + PAGE, len(whole) + 1, PAGE)
            if not node.evicted:
                held[Tier.DEVICE].update(whole[:end] for end in ends)
            if node.backuped:
                held[Tier.HOST].update(whole[:end] for end in ends)
    return held


def mirrored(kind: str, history: list[tuple[str, int, int]]) -> EventMirror:
    mirror = EventMirror()
    with pytest.MonkeyPatch.context() as patch:
        tree = History(kind, patch)
        tree.driver.core.kv_events.enabled = True
        for event in history:
            tree.apply(*event)
            mirror.take(tree.driver.cache.take_events())
            assert mirror.held == pages_of_tree(tree.driver)
        tree.end()
    return mirror


@pytest.mark.parametrize("kind", ["importance", "observe"])
@settings(max_examples=20, deadline=None)
@given(events)
def test_events_of_any_history_say_what_each_tier_holds(
    kind: str, history: list[tuple[str, int, int]]
) -> None:
    mirrored(kind, history)


@pytest.mark.parametrize("kind", rest_nightly(["importance", "observe"]))
def test_a_long_history_stores_and_removes_on_both_tiers(kind: str) -> None:
    rng = random.Random(11)
    weights = [6, 8, 6, 4, 1, 1, 2, 1, 1, 2, 2, 1, 1, 1]
    operations = rng.choices(OPERATIONS, weights, k=800)
    history = [(operation, rng.randrange(2**16), rng.randrange(2**16)) for operation in operations]
    mirror = mirrored(kind, history)
    assert mirror.counts["BlockStored"] > 100
    assert mirror.counts["BlockRemoved"] > 50
    assert mirror.held[Tier.HOST]


def published(driver: TreeDriver) -> list[Any]:
    """Of a seeded run of requests over six documents; the pool holds half of them."""
    driver.core.kv_events.enabled = True
    rng = random.Random(3)
    said: list[Any] = []
    for _ in range(120):
        document = 1000 * rng.randrange(6)
        prompt = [*range(document, document + 8 * PAGE), *rng.choices(range(5), k=rng.randrange(1, 12))]
        request = driver.admit(prompt)
        driver.prefill(request)
        driver.decode(request, rng.choices(range(5), k=rng.randrange(1, 12)))
        driver.finish(request)
        said.extend(driver.cache.take_events())
    return [(type(event).__name__, msgspec.structs.asdict(event)) for event in said]


def test_observe_publishes_what_stock_publishes() -> None:
    stock = published(TreeDriver("python-lru", tokens=128))
    assert sum(name == "BlockRemoved" for name, _ in stock) > 20
    assert published(TreeDriver("observe", tokens=128)) == stock

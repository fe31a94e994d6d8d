"""Random histories on the real tree: nothing is lost, nothing is counted twice, upstream stays consistent."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.nodes import tail_size
from sgl_importance.nodes.tail_size import LEAST_TOKENS

from support.drivers.history import OPERATIONS, History
from support.drivers.tree_driver import PAGE
from support.nightly_cases import rest_nightly

events = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 2**16), st.integers(0, 2**16)),
    min_size=10,
    max_size=80,
)


@pytest.mark.parametrize("kind", ["importance", "observe"])
@settings(max_examples=30, deadline=None)
@given(events, st.sampled_from([PAGE, LEAST_TOKENS]))
def test_any_history_keeps_the_tree_consistent(kind: str, history: list[tuple[str, int, int]], least: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail_size, "LEAST_TOKENS", least)
        tree = History(kind, patch)
        for event in history:
            tree.apply(*event)
        tree.end()


@pytest.mark.parametrize("kind", rest_nightly(["importance", "observe"]))
def test_a_long_history_meets_every_event(kind: str):
    # Requests progress more often than they end, as in a server; the seed makes the counts repeatable.
    rng = random.Random(7)
    weights = [6, 8, 6, 4, 1, 1, 2, 1, 1, 2, 2, 1, 1, 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail_size, "LEAST_TOKENS", PAGE)
        tree = History(kind, patch)
        for _ in range(1500):
            (op,) = rng.choices(OPERATIONS, weights)
            tree.apply(op, rng.randrange(2**16), rng.randrange(2**16))
        tree.end()
        wanted = (*OPERATIONS, "fold", "paths_part", "chunk", "demote", "load_back", "expire")
        if kind == "importance":
            wanted += ("tail_cut",)
        never = [event for event in wanted if tree.happened[event] < 5]
        assert not never, tree.happened

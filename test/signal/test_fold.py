"""Folds: nodes and tail sum to 1, and a query weighs 1 whatever happens to it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.signal.fold import Observation, QueryFolds, fold
from sgl_importance.signal.node_importance import NodeImportance, Origin


@given(st.lists(st.integers(1, 6), max_size=5), st.integers(0, 5), st.data())
def test_nodes_and_tail_sum_to_one(node_pages: list[int], tail_pages: int, data: st.DataObject):
    num_pages = sum(node_pages) + tail_pages
    body = np.array(
        data.draw(st.lists(st.floats(0, 10, width=32), min_size=num_pages, max_size=num_pages)),
        dtype=np.float32,
    )
    observation = Observation.from_sums(body, body)
    if observation is None:
        assert not body.sum() > 0
        return
    path = [NodeImportance(pages) for pages in node_pages]
    tail = fold(path, observation, query=1, weight=1.0, first=True, half_life_queries=8)
    assert sum(node.sums(Origin.CROSS).sum() for node in path) + tail == pytest.approx(1.0)


def test_pages_younger_than_the_last_emitting_step_get_no_mass():
    node = NodeImportance(3)
    observation = Observation.from_sums(np.array([3.0, 1.0]), np.array([1.0, 0.5]))
    assert observation is not None
    assert fold([node], observation, query=1, weight=1.0, first=True, half_life_queries=8) == 0
    assert node.body_mass() == pytest.approx([0.75, 0.25, 0.0])


def test_a_context_without_body_gives_no_observation():
    assert Observation.from_sums(np.zeros(4), np.ones(4)) is None


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_sums_that_are_not_finite_are_no_observation(value: float) -> None:
    spoilt = np.array([0.5, value])
    assert Observation.from_sums(spoilt, np.ones(2)) is None
    assert Observation.from_sums(np.ones(2), spoilt) is None


@given(st.integers(0, 20))
def test_a_query_weighs_one_however_often_it_is_retracted(interruptions: int):
    query = QueryFolds(serial=1)
    assert query.is_first
    weights = [query.take(last=False) for _ in range(interruptions)] + [query.take(last=True)]
    assert sum(weights) == pytest.approx(1.0)
    assert all(weight > 0 for weight in weights)
    assert not query.is_first
    assert query.take(last=True) == 0

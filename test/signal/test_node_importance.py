"""Page vectors: means, half-life in queries, exact splits, self and cross apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.signal.node_importance import NodeImportance, Origin

HALF = 0.5


def _observe(node: NodeImportance, query: int, body: list[float], *, first: bool = True, **kwargs: float):
    vector = np.array(body)
    node.observe(
        query, vector, vector, first=first, **{"uniform": 0.25, "weight": 1.0, "decay": 1.0, **kwargs}
    )


def test_self_and_cross_are_kept_apart():
    node = NodeImportance(2, creator=7)
    _observe(node, 7, [0.1, 0.3])
    _observe(node, 8, [0.5, 0.0])
    assert node.body_mass(Origin.SELF) == pytest.approx([0.1, 0.3])
    assert node.body_mass(Origin.CROSS) == pytest.approx([0.5, 0.0])
    assert node.body_mass() == pytest.approx([0.3, 0.15])
    assert node.queries == 1


def test_the_folds_of_one_query_count_once_and_do_not_age_each_other():
    node = NodeImportance(1, creator=1)
    _observe(node, 2, [0.4], weight=0.5, decay=HALF)
    _observe(node, 2, [0.8], weight=0.5, decay=HALF, first=False)
    assert node.queries == 1
    assert node.body_mass(Origin.CROSS) == pytest.approx([0.6])
    _observe(node, 3, [0.6], decay=HALF)
    assert node.queries == 2
    assert node.weight(Origin.CROSS) == pytest.approx([1.5])


def test_a_query_has_half_its_weight_after_the_half_life():
    node = NodeImportance(1)
    _observe(node, 1, [1.0])
    for query in range(2, 12):
        _observe(node, query, [0.0], decay=HALF ** (1 / 10))
    assert node.sums(Origin.CROSS)[0] == pytest.approx(0.5)


def test_an_unvisited_node_does_not_decay_and_reads_as_unknown():
    node = NodeImportance(3)
    assert not node.body_mass().any()
    assert node.lift() == 1.0
    assert not node.weight().any()


@given(st.integers(2, 12), st.data())
def test_split_preserves_every_page(num_pages: int, data: st.DataObject):
    node = NodeImportance(num_pages, creator=1)
    pages = st.lists(st.floats(0, 1), min_size=num_pages, max_size=num_pages)
    for query in range(1, 5):
        _observe(node, query, data.draw(pages), decay=0.9)
    before = node.page_vectors()
    prefix = node.split(data.draw(st.integers(1, num_pages - 1)))
    assert np.array_equal(np.concatenate([prefix.page_vectors(), node.page_vectors()]), before)
    assert (prefix.queries, prefix.creator) == (node.queries, node.creator)


def test_ghost_vectors_restore_what_was_known():
    node = NodeImportance(2, creator=1)
    _observe(node, 1, [0.2, 0.3])
    _observe(node, 2, [0.4, 0.1])
    restored = NodeImportance(3)
    restored.restore_pages(0, node.page_vectors(), node.queries)
    assert restored.body_mass()[:2] == pytest.approx(node.body_mass())
    assert restored.body_mass()[2] == 0
    assert restored.queries == 1


def test_pages_that_came_back_are_others_and_new_pages_behind_them_the_creators() -> None:
    node = NodeImportance(4, creator=9)
    kept = NodeImportance(2, creator=1)
    seen = {"uniform": 0.25, "weight": 1.0, "first": True, "decay": 1.0}
    kept.observe(5, np.full(2, 0.5), np.full(2, 0.5), **seen)
    node.restore_pages(0, kept.page_vectors(), kept.queries)
    node.observe(9, np.full(4, 0.25), np.full(4, 0.5), **seen)
    assert node.weight(Origin.CROSS).tolist() == [2, 2, 0, 0]
    assert node.weight(Origin.SELF).tolist() == [0, 0, 1, 1]
    assert node.queries == 2
    prefix = node.split(2)
    assert (prefix.queries, node.queries) == (2, 0)
    prefix.observe(10, np.full(2, 0.5), np.full(2, 0.5), **seen)
    node.observe(10, np.full(2, 0.5), np.full(2, 0.5), **seen)
    assert (prefix.queries, node.queries) == (3, 1)

"""The incremental eviction order picks what a full scan would pick."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.policy.victim_order import LEVELS_PER_OCTAVE, VictimOrder, level_value, value_level
from sgl_importance.reuse.estimator import ReuseEstimator
from sgl_importance.reuse.life_table import BUCKET_STARTS, NUM_AGE_BUCKETS
from sgl_importance.reuse.reuse_class import NUM_CLASSES

_events = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(0, 30),
            st.integers(0, NUM_CLASSES - 1),
            st.floats(1e-9, 1e3),
            st.integers(0, 50),
        ),
        st.tuples(st.just("discard"), st.integers(0, 30)),
        st.tuples(st.just("pop")),
        st.tuples(st.just("hit"), st.integers(0, NUM_CLASSES - 1), st.integers(0, 60)),
        st.tuples(st.just("tick"), st.integers(1, 40)),
    ),
    max_size=120,
)


@settings(max_examples=200, deadline=None)
@given(_events)
def test_pops_the_node_of_least_loss(events: list[tuple]):
    reuse = ReuseEstimator()
    order = VictimOrder(reuse)
    model: dict[int, tuple[int, int, int]] = {}
    for _ in range(60):
        reuse.tick()

    def loss(node_id: int) -> tuple[float, int, int]:
        reuse_class, level, last_access = model[node_id]
        index = reuse.index(reuse_class, reuse.clock - last_access)
        return index * 2.0 ** (level / LEVELS_PER_OCTAVE), last_access, node_id

    for event in events:
        match event:
            case ("add", node_id, reuse_class, value, last_access):
                order.add(node_id, reuse_class, value, last_access)
                model[node_id] = (reuse_class, value_level(value), last_access)
            case ("discard", node_id):
                order.discard(node_id)
                model.pop(node_id, None)
            case ("pop",):
                expected = min(model, key=loss, default=None)
                popped = order.pop()
                assert popped == expected
                if popped is not None:
                    del model[popped]
            case ("hit", reuse_class, age):
                reuse.began(reuse_class)
                reuse.hit(reuse_class, reuse.clock)
                reuse.hit(reuse_class, reuse.clock - age)
            case ("tick", requests):
                for _ in range(requests):
                    reuse.tick()
        assert len(order) == len(model)
        order.check_integrity()


def test_a_node_is_ranked_by_its_age_from_the_very_request_with_which_it_gets_there():
    reuse = ReuseEstimator()
    order = VictimOrder(reuse)
    young, old = (int(age) for age in BUCKET_STARTS[18:20])
    for _ in range(old):
        reuse.tick()
    order.add(1, 0, 1.0, reuse.clock - (old - 1))
    order.add(2, 0, level_value(-1), reuse.clock - young)
    reuse.tick()
    losses = [reuse.index(0, old), reuse.index(0, young + 1) * level_value(-1), reuse.index(0, old - 1)]
    assert losses == sorted(set(losses)), "the other lies between what the first was and is worth"
    assert order.pop() == 1


def test_a_hot_node_that_is_locked_and_unlocked_forever_costs_no_memory():
    reuse = ReuseEstimator()
    order = VictimOrder(reuse)
    for _ in range(10_000):
        order.add(1, 0, 1.0, reuse.tick())
        order.discard(1)
    order.add(1, 0, 1.0, reuse.clock)
    assert sum(len(cell.heap) for cell in order._cells.values()) < 200
    assert order.pop() == 1
    for _ in range(10_000):  # within one request, after its order was made
        order.add(1, 0, 1.0, reuse.clock)
        order.discard(1)
    assert len(order._agenda) < 200
    assert order.pop() is None


def test_cells_are_ranked_when_the_index_changes_and_not_for_each_request() -> None:
    reuse = ReuseEstimator()
    order = VictimOrder(reuse)
    for node_id in range(2000):
        reuse.tick()
        order.add(node_id, node_id % 7, level_value(node_id % 11), reuse.clock)
    ranked = []
    make_agenda = order._make_agenda
    order._make_agenda = lambda: (ranked.append(reuse.clock), make_agenda())  # type: ignore[method-assign]
    first, version = reuse.clock, reuse.version
    for _ in range(64):
        reuse.tick()
        assert order.peek() is not None
        assert len(order._agenda) <= 2 * len(order) + 64 + len(order._cells)
    order.check_integrity()
    assert reuse.version - version == 4
    assert len(ranked) == 5, (first, ranked)


class Driven:
    """An index that another thread changes at one moment: when its version is looked at so often."""

    clock = 0

    def __init__(self) -> None:
        self.changes_in = 0
        self._version = 1

    @property
    def version(self) -> int:
        self.changes_in -= 1
        self._version += self.changes_in == 0
        return self._version

    def bucket_index(self, reuse_class: int) -> list[float]:
        return [1.0 / self._version] * NUM_AGE_BUCKETS


@pytest.mark.parametrize("moment", range(1, 6))
def test_an_index_that_changes_meanwhile_hides_no_node(moment: int) -> None:
    """Storage threads ask the order of a chain's pages by the index that the scheduler's thread learns."""
    reuse = Driven()
    order = VictimOrder(reuse)
    order.add(1, 0, 1.0, 0)
    order.add(2, 0, 1.0, 0)
    assert order.peek() == 1
    order.discard(1)
    reuse.changes_in = moment
    assert order.peek() == 2
    assert order.pop() == 2
    order.check_integrity()

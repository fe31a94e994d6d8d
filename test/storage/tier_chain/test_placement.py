"""Placement: prefixes stay closed, capacities are kept, and only the last tier gives pages up."""

from __future__ import annotations

import sys
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sgl_importance.reuse.estimator import ReuseEstimator
from sgl_importance.storage.tier_chain.measure import FetchCost, fetch_seconds
from sgl_importance.storage.tier_chain.placement import Move, Placement
from sgl_importance.storage.tier_chain.ranking import LruRanking, ReuseRanking
from sgl_importance.storage.tier_chain.tier_rooms import MoveBudget, TierRooms
from sgl_importance_lab.replay.cache import replay_tree
from sgl_importance_lab.replay.policy_registry import create_policy
from sgl_importance_lab.replay.trace import TraceBuilder

SECONDS = [1.0, 2.0, 4.0, 8.0, 100.0]


class Given:
    """A ranking whose rates are what a test says."""

    def __init__(self, rates: dict[int, float]) -> None:
        self.rates = rates
        self.entered: set[tuple[int, int]] = set()

    def rate(self, page: int) -> float:
        return self.rates[page]

    def enter(self, level: int, page: int) -> None:
        self.entered.add((level, page))

    def leave(self, level: int, page: int) -> None:
        self.entered.discard((level, page))

    def cheapest(self, level: int) -> int | None:
        pages = [page for each, page in self.entered if each == level]
        return min(pages, key=lambda page: self.rates[page], default=None)

    def forget(self, page: int) -> None:
        pass


def store(placement: Placement, page: int, parent: int | None = None, now: float = 0.0) -> list[Move]:
    placement.hold({page} if parent is None else {page, parent})
    steps = placement.plan(page, parent=parent, now=now)
    for step in steps:
        placement.apply(step, parent=parent if step.page == page else None)
        placement.check_integrity()
    placement.release()
    return steps


def test_a_page_goes_where_it_saves_most_and_pushes_the_cheapest_down() -> None:
    placement = Placement(
        TierRooms([2, 2, 2]), [*SECONDS[:3], 100.0], Given({1: 5.0, 2: 7.0, 3: 6.0, 4: 1.0, 5: 0.5})
    )
    assert store(placement, 1) == [Move(1, None, 0)]
    assert store(placement, 2) == [Move(1, 0, 1), Move(2, None, 0)]
    assert store(placement, 3) == [Move(1, 1, 2), Move(3, None, 1)], "between both"
    assert store(placement, 4) == [], "worth less than what the last tier would give up"
    assert [placement.level_of(page) for page in (1, 2, 3, 4)] == [2, 0, 1, None]


def test_promotion_changes_places_with_what_is_worth_less() -> None:
    rates = {1: 5.0, 2: 4.0, 3: 1.0}
    placement = Placement(TierRooms([2, 3]), [1.0, 2.0, 100.0], Given(rates))
    for page in rates:
        store(placement, page)
    assert [placement.level_of(page) for page in rates] == [0, 1, 1]
    assert store(placement, 2) == []
    rates[3] = 9.0
    assert store(placement, 3) == [Move(1, 0, 1), Move(3, 1, 0)]
    assert [placement.level_of(page) for page in rates] == [1, 1, 0]


def test_no_page_lies_below_one_that_continues_it() -> None:
    placement = Placement(TierRooms([2, 4]), [1.0, 2.0, 100.0], Given({0: 5.0, 1: 1.0, 2: 9.0, 3: 9.0}))
    assert store(placement, 0) == [Move(0, None, 0)]
    assert store(placement, 1) == [Move(1, None, 1)]
    assert store(placement, 2, parent=1) == [Move(2, None, 1)], "though it is worth more than what is above"
    assert store(placement, 2, parent=1) == []
    assert store(placement, 3, parent=7) == [], "nobody could reach it"


def test_without_bytes_for_moves_a_new_page_goes_where_there_is_room() -> None:
    rates = {page: float(page) for page in range(1, 6)}
    placement = Placement(
        TierRooms([2, 3]), [1.0, 2.0, 100.0], Given(rates), page_bytes=10, budget=MoveBudget(2, 10.0)
    )
    assert store(placement, 1) == [Move(1, None, 0)]
    assert store(placement, 2) == [Move(1, 0, 1), Move(2, None, 0)]
    assert store(placement, 3) == [Move(3, None, 1)], "the second it lies above has been spent"
    assert store(placement, 4) == [Move(1, 1, None), Move(4, None, 1)], "giving up is no move"
    assert store(placement, 5, now=1.0) == [Move(3, 1, None), Move(2, 0, 1), Move(5, None, 0)]


def test_a_tier_slower_than_the_one_below_is_not_moved_into() -> None:
    costs = [FetchCost(1e9), FetchCost(1e6), FetchCost(1e8)]
    assert fetch_seconds(costs, 1000, recompute=1e-4) == [1e-6, 1e-5, 1e-5, 1e-4]
    assert fetch_seconds(costs, 1000, recompute=inf)[-1] == inf


def test_a_lost_page_keeps_its_place_until_it_is_stored_again() -> None:
    placement = Placement(TierRooms([3, 3]), [1.0, 2.0, 100.0], Given(dict.fromkeys(range(9), 1.0)))
    store(placement, 0)
    store(placement, 1, parent=0)
    store(placement, 2, parent=1)
    assert placement.find([0, 1, 2]) == [0, 0, 1]
    placement.lose(1)
    placement.check_integrity()
    assert placement.find([0, 1, 2]) == [0]
    store(placement, 1, parent=0)
    assert placement.find([0, 1, 2]) == [0, 0, 1]
    placement.lose(2)
    placement.check_integrity()
    assert placement.level_of(2) is None


def test_a_tier_that_fails_is_left_out_and_comes_back() -> None:
    placement = Placement(
        TierRooms([3, 3, 3]), [*SECONDS[:3], 100.0], Given({page: 9.0 - page for page in range(9)})
    )
    for page in range(6):
        store(placement, page, parent=page - 1 if page else None)
    assert placement.find(range(6)) == [0, 0, 1, 1, 2, 2]
    assert sorted(placement.close_tier(1)) == [2, 3]
    placement.check_integrity()
    assert placement.find(range(6)) == [0, 0]
    assert store(placement, 6) == [], "the last tier has nothing that is worth less and may go"
    placement.open_tier(1)
    assert placement.restore(2, 1, parent=1)
    assert placement.restore(3, 1, parent=2)
    placement.check_integrity()
    assert placement.find(range(6)) == [0, 0, 1, 1, 2, 2]


def test_a_tier_fails_that_holds_a_sequence_longer_than_the_stack() -> None:
    """Each page of it is forgotten once the last one behind it is."""
    pages = 2 * sys.getrecursionlimit()
    placement = Placement(TierRooms([2, pages + 1]), [1.0, 2.0, 100.0], LruRanking(2))
    for page in range(pages):
        assert placement.restore(page, 1, parent=page - 1 if page else None)
    assert placement.close_tier(1) == list(range(pages))
    assert not any(page in placement for page in range(pages))
    placement.check_integrity()


def test_a_page_that_others_continue_in_a_tier_that_takes_nothing_stays() -> None:
    """To give it up would cut them off."""
    placement = Placement(TierRooms([3, 3]), [1.0, 2.0, 100.0], Given(dict.fromkeys(range(9), 1.0)))
    for page in range(3):
        store(placement, page, parent=page - 1 if page else None)
    assert placement.find(range(3)) == [0, 0, 1]
    placement.rooms.stop(1)
    assert store(placement, 3) == [], "nothing may go"
    placement.widen(1)
    assert store(placement, 3) == [Move(1, 0, 1), Move(3, None, 0)], "now it may go down"
    placement.rooms.stop(1)
    assert store(placement, 4) == [Move(3, 0, None), Move(4, None, 0)], "nothing continues that one"


def test_a_page_does_not_go_below_what_continues_it_in_a_tier_that_takes_nothing() -> None:
    """Its neighbour below takes pages, and lies behind the one that does not."""
    placement = Placement(TierRooms([2, 2, 2]), [1.0, 2.0, 3.0, 100.0], Given(dict.fromkeys(range(9), 1.0)))
    for page in range(2):
        store(placement, page, parent=page - 1 if page else None)
    assert placement.find(range(2)) == [0, 1]
    placement.rooms.stop(1)
    assert store(placement, 2) == [Move(2, None, 2)], "page 0 stays in front of page 1"
    placement.check_integrity()


@pytest.mark.parametrize("capacity", [1, 3, 10])
@pytest.mark.parametrize("seed", range(5))
def test_one_tier_of_lru_is_a_prefix_cache(capacity: int, seed: int) -> None:
    """Against the readable definition of the replay."""
    import random

    rng = random.Random(seed)
    builder = TraceBuilder("t", 1)
    for _ in range(200):
        path = tuple(rng.choices("ab", k=rng.randint(1, 4)))
        names = [path[: depth + 1] for depth in range(len(path))]
        builder.add(names, input_tokens=len(names))
    trace = builder.build()
    ranking = LruRanking(1)
    placement = Placement(TierRooms([capacity]), [0.0, 1.0], ranking)
    hits = 0
    for request in range(trace.num_requests):
        path = trace.request(request).tolist()
        hits += len(placement.find(path))
        placement.hold(path)
        for page in reversed(path):
            ranking.use(page)
        for parent, page in zip([None, *path], path, strict=False):
            for step in placement.plan(page, parent=parent):
                placement.apply(step, parent=parent if step.page == page else None)
                placement.check_integrity()
        placement.release()
    assert hits == replay_tree(trace, create_policy("lru", capacity, trace)).hit_blocks


class Chains(RuleBasedStateMachine):
    """Random requests, faults and failures of tiers, under either ranking."""

    @initialize(
        capacities=st.lists(st.integers(2, 5), min_size=1, max_size=4),
        by_reuse=st.booleans(),
        speed=st.sampled_from([inf, 1.0]),
    )
    def begin(self, capacities: list[int], by_reuse: bool, speed: float) -> None:
        levels = len(capacities)
        self.reuse = ReuseEstimator()
        self.by_reuse = by_reuse
        self.ranking = ReuseRanking(levels, self.reuse, unseen_class=0) if by_reuse else LruRanking(levels)
        seconds = [*SECONDS[:levels], 100.0]
        budget = MoveBudget(levels, speed)
        self.placement = Placement(TierRooms(capacities), seconds, self.ranking, budget=budget)
        self.parents: dict[int, int | None] = {}
        self.places: dict[int, set[int]] = {}
        self.ghosts: dict[int, set[int]] = {}  # what a closed tier still holds

    @rule(path=st.lists(st.integers(0, 2), min_size=1, max_size=6), reuse_class=st.integers(0, 3))
    def request(self, path: list[int], reuse_class: int) -> None:
        pages = [int("1" + "".join(map(str, path[: depth + 1])), 4) for depth in range(len(path))]
        now = float(self.reuse.tick())
        self.placement.hold(pages)
        for page in reversed(pages):
            if isinstance(self.ranking, LruRanking):
                self.ranking.use(page)
            else:
                self.ranking.visited(page, reuse_class, self.reuse.clock)
        for parent, page in zip([None, *pages], pages, strict=False):
            self.parents[page] = parent
            for step in self.placement.plan(page, parent=parent, now=now):
                self.move(step, parent if step.page == page else None)
        self.placement.release()

    def move(self, step: Move, parent: int | None) -> None:
        """Copies, then deletes: as whoever executes a plan, and the only thing that changes a place here."""
        if step.target is None:
            takers = self.placement.rooms.takers()
            assert step.source is not None
            assert not any(level > step.source for level in takers), "not the last tier that takes pages"
            assert not any(self.parents[page] == step.page for page in self.places if self.places[page])
        else:
            self.places.setdefault(step.page, set()).add(step.target)
        self.placement.apply(step, parent=parent)
        if step.source is not None:
            self.places[step.page].remove(step.source)
        self.placement.check_integrity()

    @rule(level=st.integers(0, 3), takes=st.booleans())
    def fill_or_empty(self, level: int, takes: bool) -> None:
        if level < len(self.placement.rooms.capacities):
            (self.placement.widen if takes else self.placement.rooms.stop)(level)

    @rule(data=st.data())
    def lose_a_page(self, data: st.DataObject) -> None:
        present = sorted(page for page, levels in self.places.items() if levels)
        if present:
            page = data.draw(st.sampled_from(present))
            self.placement.lose(page)
            self.places[page].clear()

    @rule(level=st.integers(0, 3))
    def fail_or_come_back(self, level: int) -> None:
        levels = len(self.placement.rooms.capacities)
        if level >= levels or levels == 1:
            return
        if self.placement.rooms.is_open(level):
            lost = set(self.placement.close_tier(level))
            self.ghosts[level] = lost
            for page in lost:
                self.places[page].clear()
            return
        self.placement.open_tier(level)
        for page in sorted(self.ghosts.pop(level)):  # a prefix has a smaller number
            if self.placement.restore(page, level, parent=self.parents[page]):
                self.places[page] = {level}

    @invariant()
    def every_page_is_where_it_was_put(self) -> None:
        if hasattr(self, "placement"):
            self.placement.check_integrity()
            assert all(len(levels) <= 1 for levels in self.places.values())
            for page, levels in self.places.items():
                assert self.placement.level_of(page) == (min(levels) if levels else None)


TestChains = Chains.TestCase
TestChains.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 30)), max_size=40))
def test_moves_never_exceed_their_bytes_per_second(requests: list[tuple[float, int]]) -> None:
    budget, now, spent = MoveBudget(1, 10.0), 0.0, 0
    for passed, size in requests:
        now += passed
        if budget.affords({0: size}, now):
            budget.spend(0, size)
            spent += size
    assert spent <= 10.0 * (now + 1.0) + 1e-6


def test_a_page_larger_than_a_seconds_bytes_moves_in_the_end() -> None:
    budget = MoveBudget(1, 10.0, page_bytes=25)
    assert budget.affords({0: 25}, now=0.0)
    budget.spend(0, 25)
    assert not budget.affords({0: 25}, now=2.0)
    assert budget.affords({0: 25}, now=2.5)

"""The life table and its index, against brute force over single intervals."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance.reuse.estimator import DECAY, HALF_LIFE, REFRESH_INTERVAL, ReuseEstimator
from sgl_importance.reuse.hazards import hazards, retention_index
from sgl_importance.reuse.life_table import (
    BUCKET_STARTS,
    BUCKET_WIDTHS,
    EXACT_AGE,
    GROUP,
    MAX_AGE,
    NUM_AGE_BUCKETS,
    NUM_EXACT_BUCKETS,
    age_bucket,
)
from sgl_importance.reuse.reuse_class import (
    CLASSES_OF_END,
    NUM_CLASSES,
    NUM_COUNTED_LEVELS,
    NUM_VISIT_LEVELS,
    BlockType,
    Transition,
    answer_end_of,
    reuse_class,
    transition_of,
    visit_level,
)
from sgl_importance_lab.replay.sessions import visit_levels

_CLASS = reuse_class(BlockType.USER, Transition.COLD, 0)


def test_class_numbers_are_distinct_and_those_of_unknown_ends_come_first():
    facts = [
        (b, t, v, e)
        for e in AnswerEnd
        for b in BlockType
        for t in Transition
        for v in range(NUM_VISIT_LEVELS)
        if e is AnswerEnd.UNKNOWN or b is not BlockType.SHARED_PREFIX
    ]
    numbers = [reuse_class(*each) for each in facts]
    assert len(set(numbers)) == len(numbers)
    assert numbers[:CLASSES_OF_END] == list(range(CLASSES_OF_END))
    assert max(numbers) < NUM_CLASSES
    for (block_type, transition, level, end), number in zip(facts, numbers, strict=True):
        assert (transition_of(number), answer_end_of(number)) == (transition, end)
        if block_type is BlockType.SHARED_PREFIX:
            assert {reuse_class(block_type, transition, level, each) for each in AnswerEnd} == {number}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, NUM_CLASSES - 1), min_size=40, max_size=80, unique=True), st.randoms())
def test_the_estimate_does_not_depend_on_the_order_in_which_classes_occur(classes: list[int], random: Random):
    """Of more classes than there is room for at first; the hazards are those of one table of all."""
    visited = set(classes[::2])
    one, other = ReuseEstimator(), ReuseEstimator()
    for reuse, order in ((one, classes), (other, random.sample(classes, len(classes)))):
        for each in order:
            reuse.began(each)
        for _ in range(3 * REFRESH_INTERVAL):
            reuse.tick()
        for each in order:
            if each in visited:
                reuse.hit(each, 0)
        reuse.refresh()
    hits, reached = one.counts()
    np.testing.assert_array_equal((hits, reached), other.counts())
    index = retention_index(hazards(hits, reached, np.arange(NUM_CLASSES) % NUM_VISIT_LEVELS))
    for each in range(NUM_CLASSES):
        assert one.bucket_index(each) == other.bucket_index(each)
        np.testing.assert_allclose(one.bucket_index(each), index[each], rtol=1e-9)
    assert one.open_intervals() == other.open_intervals() == {(0, each): 1 for each in classes[1::2]}
    restored = ReuseEstimator()
    restored.restore(*one.counts(), one.clock)
    assert all(restored.bucket_index(each) == one.bucket_index(each) for each in range(NUM_CLASSES))


@given(st.integers(0, 2 * MAX_AGE))
def test_a_bucket_holds_its_age(age: int):
    bucket = age_bucket(age)
    assert max(age, 1) >= BUCKET_STARTS[bucket]
    assert bucket == NUM_AGE_BUCKETS - 1 or age < BUCKET_STARTS[bucket + 1]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=REFRESH_INTERVAL - 1))
def test_counts_are_those_of_single_watches(requests: list[list[int]]):
    """Each request visits some of five nodes; an interval runs from one visit of a node to its next."""
    reuse = ReuseEstimator()
    hits, reached = np.zeros(NUM_AGE_BUCKETS), np.zeros(NUM_AGE_BUCKETS)
    start: dict[int, int] = {}
    for nodes in requests:
        clock = reuse.tick()
        for begun in start.values():
            reached[clock - begun == BUCKET_STARTS] += 1
        for node in set(nodes):
            if node in start:
                reuse.hit(_CLASS, start[node])
                hits[age_bucket(clock - start[node])] += 1
            start[node] = clock
            reuse.began(_CLASS)
    counted_hits, counted_reached = reuse.counts()
    np.testing.assert_array_equal(counted_hits[_CLASS], hits)
    np.testing.assert_array_equal(counted_reached[_CLASS], reached)


def test_groups_of_requests_get_to_buckets_as_a_whole():
    assert BUCKET_STARTS[NUM_EXACT_BUCKETS] == EXACT_AGE
    assert EXACT_AGE % GROUP == 0
    assert not (BUCKET_STARTS[NUM_EXACT_BUCKETS:] % GROUP).any()
    assert BUCKET_STARTS[-1] < MAX_AGE


@pytest.mark.parametrize("bucket", range(NUM_EXACT_BUCKETS, NUM_AGE_BUCKETS))
def test_a_visit_counts_in_no_bucket_that_its_group_has_not_reached(bucket: int):
    first = MAX_AGE
    reuse = ReuseEstimator()
    reuse.restore(*reuse.counts(), first + int(BUCKET_STARTS[bucket]) - 2)
    ends = []
    for start in (first, first + GROUP - 1):
        reuse.resumed(_CLASS, start)
        while reuse.clock - start < BUCKET_STARTS[bucket]:
            reuse.tick()
        before = reuse.counts()[0]
        reuse.hit(_CLASS, start)
        ends += np.argwhere(reuse.counts()[0] > before).tolist()
    assert ends == [[_CLASS, bucket - 1], [_CLASS, bucket]]


_near_a_bucket = st.builds(
    lambda first, ahead: max(0, first - ahead),
    st.sampled_from([*BUCKET_STARTS.tolist(), MAX_AGE]),
    st.integers(-2, GROUP + 200),
)


@settings(max_examples=30, deadline=None)
@given(
    clock=st.integers(MAX_AGE, 2 * MAX_AGE),
    ages=st.lists(_near_a_bucket, max_size=12),
    events=st.lists(st.tuples(st.integers(0, 2 * GROUP), st.integers(0, 3), st.integers(0, 99)), max_size=20),
)
def test_counts_are_those_of_a_list_of_all_intervals(
    clock: int, ages: list[int], events: list[tuple[int, int, int]]
):
    """An old interval counts as if it had begun with the last request of its group."""
    reuse = ReuseEstimator()
    hits, reached = np.zeros((2, NUM_CLASSES, NUM_AGE_BUCKETS))
    reuse.restore(hits, reached, clock)
    intervals = [(clock - age, number % 3) for number, age in enumerate(ages)]
    for start, class_ in intervals:
        reuse.resumed(class_, start)
    intervals = [each for each in intervals if clock - each[0] < MAX_AGE]
    first_ages = {first: bucket for bucket, first in enumerate(BUCKET_STARTS.tolist())}

    def counted_age(start: int) -> int:
        exact = reuse.clock - start
        return exact if exact < EXACT_AGE else reuse.clock - (start // GROUP * GROUP + GROUP - 1)

    due: dict[int, list[tuple[int, int]]] = {}
    for after, kind, which in events:
        due.setdefault(after, []).append((kind, which))
    for after in range(2 * GROUP):
        reuse.tick()
        for start, class_ in intervals:
            if (age := counted_age(start)) in first_ages:
                reached[class_, first_ages[age]] += 1
        if reuse.clock % REFRESH_INTERVAL == 0:
            hits *= DECAY
            reached *= DECAY
        for kind, which in due.get(after, ()):
            if kind == 0 or not intervals:
                reuse.began(which % 3)
                intervals.append((reuse.clock, which % 3))
                continue
            start, class_ = intervals.pop(which % len(intervals))
            if kind == 1:
                reuse.hit(class_, start)
                hits[class_, age_bucket(counted_age(start))] += 1
            elif kind == 2:
                reuse.forgotten(class_, start)
            else:
                reuse.reclassified(class_, (class_ + 1) % 3, start)
                intervals.append((start, (class_ + 1) % 3))
    counted_hits, counted_reached = reuse.counts()
    np.testing.assert_allclose(counted_hits, hits, rtol=1e-12)
    np.testing.assert_allclose(counted_reached, reached, rtol=1e-12)
    for start, class_ in intervals:
        reuse.forgotten(class_, start)
    given_up = sum(reuse.clock - start >= MAX_AGE for start, _ in intervals)
    assert len(reuse.open_intervals()) <= given_up, (
        "of these a group is forgotten at once, and a little later"
    )
    assert all(number > 0 for number in reuse.open_intervals().values())


def test_visits_and_their_absence_fade_alike():
    reuse = ReuseEstimator()
    start = reuse.tick()
    reuse.began(_CLASS)
    reuse.tick()
    reuse.hit(_CLASS, start)
    hits, reached = reuse.counts()
    assert (hits.sum(), reached.sum()) == (1, 1)
    for _ in range(HALF_LIFE):
        reuse.tick()
    faded_hits, faded_reached = reuse.counts()
    np.testing.assert_allclose(faded_hits, hits / 2)
    np.testing.assert_allclose(faded_reached, reached / 2)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1e-4, 1.0), min_size=NUM_AGE_BUCKETS, max_size=NUM_AGE_BUCKETS))
def test_the_index_is_the_best_of_all_horizons(hazard: list[float]):
    index = retention_index(np.array([hazard]))[0]
    for first in range(0, NUM_AGE_BUCKETS, 7):
        best, survival, kept = 0.0, 1.0, 0.0
        for bucket in range(first, NUM_AGE_BUCKETS):
            visit = survival * hazard[bucket]
            kept += (survival - visit / 2) * BUCKET_WIDTHS[bucket]
            survival -= visit
            best = max(best, (1 - survival) / kept)
        assert index[first] == pytest.approx(best)


def test_without_evidence_older_is_worth_less_and_more_visits_are_worth_more():
    reuse = ReuseEstimator()
    for level in range(NUM_VISIT_LEVELS):
        reuse_class_ = reuse_class(BlockType.USER, Transition.COLD, level)
        curve = [reuse.index(reuse_class_, int(age)) for age in BUCKET_STARTS]
        assert all(a >= b * (1 - 1e-12) > 0 for a, b in pairwise(curve))
        assert curve == reuse.bucket_index(reuse_class(BlockType.GENERATED, Transition.BRANCH, level))
    counted = [reuse.index(level, 5) for level in range(NUM_COUNTED_LEVELS)]
    timed = [reuse.index(level, 5) for level in range(NUM_COUNTED_LEVELS, NUM_VISIT_LEVELS)]
    assert counted == sorted(counted)
    assert timed == sorted(timed, reverse=True)


def test_a_known_gap_is_the_rate_until_there_is_evidence():
    reuse = ReuseEstimator()
    for division, gap in enumerate((2, 8, 32, 128, 512, 2048)):
        assert reuse.index(NUM_COUNTED_LEVELS + division, 1) == pytest.approx(1 / gap, rel=0.3)


def test_a_class_without_evidence_follows_the_others_of_its_visit_level():
    """Levels are taught the contrary of what they start with: first visits return, later ones never."""
    reuse = ReuseEstimator()
    for _ in range(200):
        start = reuse.clock
        for level in range(NUM_COUNTED_LEVELS):
            reuse.began(reuse_class(BlockType.USER, Transition.COLD, level))
        reuse.tick()
        reuse.hit(reuse_class(BlockType.USER, Transition.COLD, 0), start)
    reuse.refresh()
    unseen = [reuse_class(BlockType.GENERATED, Transition.BRANCH, level) for level in range(2)]
    assert reuse.index(unseen[0], 1) > reuse.index(unseen[1], 1)


def test_a_interval_without_outcome_is_censored_not_counted_as_a_miss():
    def probability(*, forget: bool) -> float:
        reuse = ReuseEstimator()
        for _ in range(40):
            for _ in range(10):
                reuse.began(_CLASS)
            start = reuse.clock
            reuse.tick()
            for i in range(10):
                if i < 5:
                    reuse.hit(_CLASS, start)
                elif forget:
                    reuse.forgotten(_CLASS, start)
        reuse.refresh()
        return reuse.probability(_CLASS, 100)

    assert probability(forget=True) > probability(forget=False)


def test_evidence_moves_its_own_class_most_and_ages_away():
    reuse = ReuseEstimator()
    other = reuse_class(BlockType.GENERATED, Transition.COLD, 0)
    for _ in range(200):
        reuse.began(_CLASS)
        start = reuse.clock
        reuse.tick()
        reuse.hit(_CLASS, start)
        reuse.began(other)
    assert reuse.index(_CLASS, 1) > reuse.index(other, 1)
    assert reuse.probability(_CLASS, 1) > 0.9
    taught = reuse.counts()[0].sum()
    for _ in range(2**13):
        reuse.tick()
    assert reuse.counts()[0].sum() == pytest.approx(taught / 2, rel=0.01)


def test_the_longest_interval_is_given_up():
    reuse = ReuseEstimator()
    reuse.restore(*reuse.counts(), MAX_AGE)
    start = 1
    reuse.resumed(_CLASS, start)
    assert reuse.open_intervals()
    for _ in range(GROUP + EXACT_AGE):
        reuse.tick()
    assert not reuse.open_intervals()
    reuse.hit(_CLASS, start)
    assert not reuse.open_intervals()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 50), min_size=NUM_AGE_BUCKETS, max_size=NUM_AGE_BUCKETS),
    st.lists(st.integers(0, 50), min_size=NUM_AGE_BUCKETS, max_size=NUM_AGE_BUCKETS),
)
def test_hazards_and_probabilities_are_probabilities(hits: list[int], missed: list[int]):
    counts = np.array([hits], dtype=float)
    for level in range(NUM_VISIT_LEVELS):
        hazard = hazards(counts, counts + np.array([missed]), np.array([level]))
        assert hazard.shape == (1, NUM_AGE_BUCKETS)
        assert ((hazard > 0) & (hazard <= 1)).all()


def naive_hazard(hits: np.ndarray, reached: np.ndarray, levels: np.ndarray, row: int, bucket: int) -> float:
    """One hazard as docs/how_it_works.md words it, sum by sum."""
    pooled = [
        (column.sum() + 4 * 0.05) / (other.sum() + 4) for column, other in zip(hits.T, reached.T, strict=True)
    ]
    if levels[row] >= NUM_COUNTED_LEVELS:
        span = 8 * 2 * 4 ** int(levels[row] - NUM_COUNTED_LEVELS)
        start, width = BUCKET_STARTS[bucket], BUCKET_WIDTHS[bucket]
        prior, strength = 1 - ((span + start) / (span + start + width)) ** 8, 1.0
    else:
        level = levels == levels[row]
        believed = 0.5 * 2 ** int(levels[row])
        level_ratio = (hits[level].sum() + 2 * believed) / ((reached[level] @ pooled).sum() + 2)
        ratio = (hits[row].sum() + 2 * level_ratio) / (reached[row] @ pooled + 2)
        prior, strength = ratio * pooled[bucket], 0.5
    return min((hits[row, bucket] + strength * prior) / (reached[row, bucket] + strength), 1.0)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, NUM_VISIT_LEVELS - 1), min_size=1, max_size=6))
def test_hazards_are_those_of_the_definition(seed: int, levels: list[int]):
    rng = np.random.default_rng(seed)
    shape = (len(levels), NUM_AGE_BUCKETS)
    hits = rng.integers(0, 9, shape) * rng.random(shape) * (rng.random((shape[0], 1)) < 0.7)
    reached = hits + rng.integers(0, 30, shape) * (hits.any(axis=1)[:, None])
    computed = hazards(hits, reached, np.array(levels))
    for row in range(len(levels)):
        for bucket in range(0, NUM_AGE_BUCKETS, 5):
            expected = naive_hazard(hits, reached, np.array(levels), row, bucket)
            assert computed[row, bucket] == pytest.approx(expected)


@given(st.integers(0, 300), st.integers(1, 5000))
def test_a_longer_horizon_is_never_less_likely(age: int, horizon: int):
    reuse = ReuseEstimator()
    near = reuse.probability_within(_CLASS, age, horizon)
    far = reuse.probability_within(_CLASS, age, 2 * horizon)
    assert 0 <= near <= far <= 1


@pytest.mark.parametrize(
    ("accesses", "span", "level"),
    [
        (0, 0, 0),
        (1, 9, 1),
        (3, 99, 2),
        (4, 4, 3),
        (7, 7000, 3),
        (8, 8, 4),
        (8, 31, 4),
        (8, 32, 5),
        (9, 10**6, 9),
    ],
)
def test_few_visits_are_counted_and_many_are_timed(accesses: int, span: int, level: int) -> None:
    assert visit_level(accesses, span) == level


@given(accesses=st.integers(0, 50), spans=st.lists(st.integers(0, 10**5), min_size=2, max_size=2))
def test_the_more_frequent_of_equally_visited_nodes_is_lower(accesses: int, spans: list[int]) -> None:
    low, high = (visit_level(accesses, span) for span in sorted(spans))
    assert low <= high < NUM_VISIT_LEVELS
    assert visit_levels(np.array([accesses]), np.array(spans[:1])) == [visit_level(accesses, spans[0])]

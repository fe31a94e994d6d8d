"""What chance explains is taken out of hazards, and no more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance.reuse.hazards import PRIORS, falling_trend, hazards, shrink
from sgl_importance.reuse.turns import TurnEstimator, turn_bucket

BUCKETS = st.integers(1, 12)


@st.composite
def _hazards(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n = draw(BUCKETS)

    def of(low: float, high: float) -> np.ndarray:
        return np.array(draw(st.lists(st.floats(low, high), min_size=n, max_size=n)))

    return of(0.0, 0.95), of(1.0, 100.0), of(1.0, 50.0)


@given(_hazards())
def test_the_trend_is_the_nearest_that_never_rises(drawn):
    hazard, reached, widths = drawn
    rate, weight = -np.log1p(-hazard) / widths, reached * widths
    n = len(hazard)

    def mean(first: int, last: int) -> float:
        return float(np.average(rate[first : last + 1], weights=weight[first : last + 1]))

    # The min-max formula of isotonic regression (Robertson, Wright, Dykstra, 1988).
    nearest = [max(min(mean(a, b) for a in range(i + 1)) for b in range(i, n)) for i in range(n)]
    assert_allclose(falling_trend(hazard, reached, widths), -np.expm1(-np.array(nearest) * widths), atol=1e-9)


@given(_hazards(), st.data())
def test_a_shrunk_hazard_lies_between(drawn, data):
    hazard, reached, _ = drawn
    simpler = np.array(data.draw(st.lists(st.floats(0, 1), min_size=len(hazard), max_size=len(hazard))))
    shrunk = hazard.copy()
    shrink(shrunk, simpler, hazard * reached, reached)
    assert (np.minimum(hazard, simpler) - 1e-12 <= shrunk).all()
    assert (shrunk <= np.maximum(hazard, simpler) + 1e-12).all()


@pytest.mark.parametrize(("intervals", "kept"), [(10.0, 0.0), (10_000.0, 0.99)])
def test_a_difference_is_kept_once_chance_does_not_explain_it(intervals, kept):
    hazard, simpler = np.array([0.3, 0.1, 0.3]), np.full(3, 0.2)
    shrunk, reached = hazard.copy(), np.full(3, intervals)
    shrink(shrunk, simpler, hazard * reached, reached)
    assert_allclose(shrunk, simpler + kept * (hazard - simpler), atol=0.01)


def _learnt_from(gaps: list[int]) -> np.ndarray:
    """The index of turns that went on after these times, one behind the other."""
    estimator = TurnEstimator()
    now, turn = 0.0, None
    for gap in gaps:
        now += gap
        turn = estimator.begin(now, AnswerEnd.UNKNOWN, 2, turn)
    assert turn is not None
    return estimator.index[turn.turn_class]


def test_a_rhythm_is_learnt():
    index = _learnt_from([40] * 200)
    assert index[turn_bucket(30)] > 2 * index[0], "at an age of thirty the return at forty is near"


def test_with_few_intervals_the_estimate_is_nearer_to_the_truth():
    true = np.full((4, 20), 0.1) * np.array([[0.5], [1.0], [1.0], [2.0]])
    rng = np.random.default_rng(1)
    errors = []
    for _ in range(50):
        hits, reached = np.zeros((2, *true.shape))
        for row, hazard in enumerate(true):
            left = 25
            for bucket, each in enumerate(hazard):
                reached[row, bucket] = left
                hits[row, bucket] = rng.binomial(left, each)
                left -= int(hits[row, bucket])
        estimates = (
            hazards(hits, reached, np.ones(4, dtype=np.int64), PRIORS._replace(is_shrunk=is_shrunk))
            for is_shrunk in (False, True)
        )
        errors.append([float(((each - true) ** 2).mean()) for each in estimates])
    plain, shrunk = np.mean(errors, axis=0)
    assert shrunk < 0.7 * plain

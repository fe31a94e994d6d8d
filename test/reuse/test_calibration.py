"""Predictions of reuse against what followed, in a bounded table."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.reuse.calibration import (
    BUCKETS,
    HORIZON,
    MAX_PENDING,
    NUM_BUCKETS,
    SAMPLED_EVERY,
    Calibration,
)


@pytest.mark.parametrize(("probability", "bucket"), [(0.0, 0), (0.05, 0), (0.1, 1), (0.95, 9), (1.0, 9)])
def test_a_prediction_is_judged_in_the_bucket_of_its_probability(probability: float, bucket: int):
    calibration = Calibration()
    calibration.predict(probability, clock=5)
    calibration.advance(5 + HORIZON)
    assert sum(calibration.judged) == 0, "a visit at the horizon still counts"
    calibration.advance(6 + HORIZON)
    assert [index for index, count in enumerate(calibration.judged) if count] == [bucket]
    assert calibration.predicted[bucket] == probability
    assert len(BUCKETS) == NUM_BUCKETS
    assert float(BUCKETS[bucket]) >= probability


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1), st.booleans()), max_size=60))
@settings(deadline=None)
def test_every_prediction_is_judged_once(visits: list[tuple[int, float, bool]]):
    calibration, clock = Calibration(), 0
    for step, probability, comes_true in visits:
        clock += step
        calibration.advance(clock)
        calibration.predict(probability, clock).came_true = comes_true
    calibration.advance(clock + HORIZON + 1)
    assert sum(calibration.judged) == len(visits)
    assert sum(calibration.observed) == sum(comes_true for *_, comes_true in visits)
    assert sum(calibration.predicted) == pytest.approx(sum(probability for _, probability, _ in visits))
    assert all(hits <= judged for hits, judged in zip(calibration.observed, calibration.judged, strict=True))


def test_one_visit_in_some_is_sampled_and_the_table_is_bounded():
    calibration = Calibration()
    taken = 0
    for _ in range(SAMPLED_EVERY * (MAX_PENDING + 100)):
        if calibration.wants():
            calibration.predict(0.5, clock=0)
            taken += 1
    assert taken == MAX_PENDING
    calibration.clear()
    calibration.advance(HORIZON + 1)
    assert not any(calibration.judged), "a flush is no outcome"

"""Ages of KV against naive counts, and the sentence that they make."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.nodes.ages import (
    AGE_BOUNDS,
    MAX_TIMES,
    NOWHERE,
    Ages,
    ClockTimes,
    Histogram,
    in_words,
    sentence,
)
from sgl_importance.tiers import Tier


class Now:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


# ---- from the clock of requests to seconds ----


def test_age_is_the_time_since_the_clock_had_a_value():
    now = Now()
    times = ClockTimes(now)
    assert times.age(5) is None
    for clock, seconds in ((3, 10.0), (4, 20.0), (7, 50.0)):
        now.seconds = seconds
        times.tick(clock)
    now.seconds = 100.0
    assert [times.age(clock) for clock in (2, 3, 4, 6, 7, 99)] == [None, 90, 80, 80, 50, 50]


@given(st.integers(0, 2**32))
def test_memory_is_bounded_and_errors_are_small_beside_the_age(seed: int):
    generator, now, times = random.Random(seed), Now(), None
    times = ClockTimes(now)
    at = []
    for clock in range(3 * MAX_TIMES + 1):  # the last one makes them too many
        now.seconds += generator.choice((0.1, 1.0, 5.0))
        times.tick(clock)
        at.append(now.seconds)
        assert len(times._clocks) == len(times._seconds) <= MAX_TIMES
    for clock in range(0, len(at), 97):
        age = times.age(clock)
        true = now.seconds - at[clock]
        if age is None:
            continue
        assert true <= age <= true + 0.1 * true + 5
    for clock in range(len(at) - MAX_TIMES // 2, len(at)):
        assert times.age(clock) == now.seconds - at[clock], "beside a short age an error would count"


# ---- histograms ----


@given(
    st.lists(st.tuples(st.floats(0, 2e6), st.integers(1, 500)), min_size=1, max_size=60),
    st.floats(0.01, 0.99),
)
def test_weights_and_quantiles_are_those_of_a_naive_count(values, share: float):
    histogram = Histogram(AGE_BOUNDS)
    for value, weight in values:
        histogram.add(value, weight)
    assert histogram.weight == sum(weight for _, weight in values)
    assert histogram.total == pytest.approx(sum(value * weight for value, weight in values))
    for bound, weight in zip((*AGE_BOUNDS, float("inf")), histogram.cumulative(), strict=True):
        assert weight == sum(each for value, each in values if value <= bound)
    naive = sorted(value for value, weight in values for _ in range(weight))
    rank = naive[min(len(naive) - 1, max(0, -(-share * len(naive) // 1) - 1).__int__())]
    place = next((n for n, bound in enumerate(AGE_BOUNDS) if rank <= bound), len(AGE_BOUNDS))
    low = AGE_BOUNDS[place - 1] if place else 0
    high = AGE_BOUNDS[min(place, len(AGE_BOUNDS) - 1)]
    assert low <= histogram.quantile(share) <= high


def test_quantiles_lie_linearly_within_a_bucket():
    histogram = Histogram((10, 20, 40))
    assert histogram.quantile(0.5) is None
    histogram.add(5, 1)
    histogram.add(30, 3)
    assert histogram.quantile(0.25) == 10
    assert histogram.quantile(0.5) == pytest.approx(20 + 20 / 3)
    both = Histogram.merged([histogram, histogram])
    assert (both.weights, both.total) == ([2, 0, 6, 0], 190)
    assert histogram.weight == 4


# ---- ages ----


def test_ages_count_tokens_by_place():
    now = Now()
    ages = Ages(now)
    for clock, seconds in ((1, 0.0), (2, 100.0)):
        now.seconds = seconds
        ages.admitted(clock)
    now.seconds = 160.0
    ages.asked_again(Tier.DEVICE, 16, 1)
    ages.asked_again(NOWHERE, 48, 2)
    ages.asked_again(Tier.HOST, 7, 0)  # nobody knows when that was
    ages.gave_up(Tier.DEVICE, 32, 1, accesses=3)
    described = ages.describe()
    assert ages.returned[Tier.DEVICE].total == 16 * 160
    assert ages.returned[NOWHERE].total == 48 * 60
    assert ages.returned[Tier.HOST].weight == 0
    assert ages.reuses[Tier.DEVICE].total == 32 * 3
    assert described["median_seconds"]["returned"]["host"] is None
    assert described["device_holds_seconds"] == pytest.approx(ages.evicted[Tier.DEVICE].quantile(0.5))
    exact = statistics.median([160] * 16 + [60] * 48)
    assert 30 < described["half_return_within_seconds"] <= exact


def test_what_is_held_is_replaced_as_a_whole():
    ages = Ages(Now())
    ages.admitted(1)
    assert set(ages.resident_tokens.values()) == {0}
    seen = {tier: Histogram(AGE_BOUNDS) for tier in Tier}
    ages.lies(seen[Tier.DEVICE], 64, 1)
    ages.looked_at(seen)
    assert ages.resident_tokens["device", "1.0"] == ages.resident_tokens["device", "+Inf"] == 64
    assert ages.resident_tokens["host", "+Inf"] == 0


@pytest.mark.parametrize(
    ("holds", "returns", "words"),
    [
        (
            720,
            190,
            "The device holds about 12 minutes of traffic, half of the returns come within 3 minutes.",
        ),
        (None, 42, "The device has evicted nothing yet, half of the returns come within 42 seconds."),
        (5400, None, "The device holds about 1.5 hours of traffic, nothing has come back yet."),
    ],
)
def test_the_sentence(holds, returns, words: str):
    assert sentence(holds, returns) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "a second"), (60, "1 minute"), (86_400, "1 day"), (7 * 86_400, "7 days")]
)
def test_times_in_words(seconds: float, words: str):
    assert in_words(seconds) == words

"""Sizes for recorded traffic: the cheapest by hand, and what any recommendation must satisfy."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sgl_importance.tiers import Tier
from sgl_importance_lab.sizing.sizing import (
    GB,
    HOURS_PER_MONTH,
    Hardware,
    HitCurve,
    Prices,
    SizingError,
    Traffic,
    evaluate,
    recommend,
)

# One token is one GB, so capacities read as GB.
HARDWARE = Hardware(10**9, 1.0, {Tier.HOST: 1e10, Tier.STORAGE: 2e9})
PRICES = Prices({Tier.DEVICE: 10.0, Tier.HOST: 1.0, Tier.STORAGE: 0.1}, prefill_hour=1.0)
MONTH = Traffic(prompt_tokens=3_600_000, hours=HOURS_PER_MONTH, longest_request=1)
"""A thousand hours of prefill a month, if nothing is cached."""

curves = st.lists(
    st.tuples(st.integers(1, 10_000), st.floats(0, 1)),
    min_size=1,
    max_size=9,
    unique_by=lambda point: point[0],
).map(HitCurve.of)
prices = st.builds(
    lambda device, host, storage, hour: Prices(
        {Tier.DEVICE: device, Tier.HOST: host, Tier.STORAGE: storage}, hour
    ),
    *[st.floats(0.01, 100) for _ in range(4)],
)


def test_a_token_costs_what_its_source_costs() -> None:
    assert HARDWARE.seconds_per_token(None) == 1.0
    assert HARDWARE.seconds_per_token(Tier.DEVICE) == 0.0
    assert HARDWARE.seconds_per_token(Tier.HOST) == pytest.approx(0.1)
    assert HARDWARE.seconds_per_token(Tier.STORAGE) == pytest.approx(0.6)
    slow = Hardware(10**9, 1.0, {Tier.HOST: 1e10, Tier.STORAGE: 1e8})
    assert slow.seconds_per_token(Tier.STORAGE) == 1.0, "a copy slower than computing is not awaited"


def test_one_combination_by_hand() -> None:
    curve = HitCurve.of([(10, 0.2), (100, 0.5), (1000, 0.6)])
    found = evaluate(curve, {Tier.DEVICE: 10, Tier.HOST: 100, Tier.STORAGE: 1000}, MONTH, HARDWARE, PRICES)
    assert found.shares == pytest.approx({Tier.DEVICE: 0.2, Tier.HOST: 0.3, Tier.STORAGE: 0.1})
    # 0.4 computed, 0.3 at 0.1, 0.1 at 0.6 of a second, on a thousand hours.
    assert found.restore_hours == pytest.approx(1000 * (0.4 + 0.03 + 0.06))
    assert found.memory_price == pytest.approx(100 + 100 + 100)
    assert found.total_price == pytest.approx(300 + 490)


def test_memory_that_does_not_pay_is_left_out() -> None:
    curve = HitCurve.of([(10, 0.2), (100, 0.5), (1000, 0.6)])
    dear = Prices({Tier.DEVICE: 10.0, Tier.HOST: 1000.0, Tier.STORAGE: 1000.0}, prefill_hour=1.0)
    assert recommend(curve, MONTH, HARDWARE, dear).tokens == {Tier.DEVICE: 10, Tier.HOST: 0, Tier.STORAGE: 0}
    free = Prices(dict.fromkeys(Tier, 0.0), prefill_hour=1.0)
    assert recommend(curve, MONTH, HARDWARE, free).tokens[Tier.DEVICE] == 1000
    assert recommend(curve, MONTH, HARDWARE, PRICES).tokens == {
        Tier.DEVICE: 10,
        Tier.HOST: 100,
        Tier.STORAGE: 0,
    }


@given(curves, prices, st.one_of(st.none(), st.floats(0, 1)))
def test_a_recommendation_is_the_cheapest_that_reaches_the_target(
    curve: HitCurve, asked: Prices, target: float | None
) -> None:
    if target is not None and target > curve.rates[-1]:
        with pytest.raises(SizingError, match="lower --target-hit-rate"):
            recommend(curve, MONTH, HARDWARE, asked, target_hit_rate=target)
        return
    found = recommend(curve, MONTH, HARDWARE, asked, target_hit_rate=target)
    assert found.hit_rate >= (target or 0) - 1e-9
    assert found.hit_rate == pytest.approx(curve.rate(max(found.tokens.values())))
    assert all(share >= 0 for share in found.shares.values())
    for device, host, storage in product(curve.tokens, [0, *curve.tokens], [0, *curve.tokens]):
        tokens = {Tier.DEVICE: float(device), Tier.HOST: float(host), Tier.STORAGE: float(storage)}
        other = evaluate(curve, tokens, MONTH, HARDWARE, asked)
        if target is None or other.hit_rate >= target:
            assert found.total_price <= other.total_price * (1 + 1e-9)


@given(curves, st.floats(0, 1))
def test_needed_is_the_smallest_that_reaches_a_rate(curve: HitCurve, rate: float) -> None:
    needed = curve.needed(rate)
    if needed is None:
        assert curve.rates[-1] < rate
        return
    assert curve.rate(needed) >= rate - 1e-12
    assert all(curve.rate(size) < rate for size in curve.tokens if size < needed)


@given(curves)
def test_marginal_seconds_add_up_to_what_the_largest_cache_saves(curve: HitCurve) -> None:
    assume(len(curve.tokens) > 1)
    saved = curve.seconds_saved_per_gb(MONTH, HARDWARE)
    gigabytes = np.diff(curve.tokens * HARDWARE.bytes_per_token / GB, prepend=0)
    assert (saved * gigabytes).sum() == pytest.approx(curve.rates[-1] * MONTH.prompt_tokens)


def test_the_knee_is_where_the_curve_turns() -> None:
    assert HitCurve.of([(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.31), (10, 0.33)]).knee() == 3


def test_a_device_holds_at_least_one_request() -> None:
    curve = HitCurve.of([(10, 0.2), (100, 0.5)])
    long = Traffic(MONTH.prompt_tokens, MONTH.hours, longest_request=50)
    assert recommend(curve, long, HARDWARE, PRICES).tokens[Tier.DEVICE] == 100
    with pytest.raises(SizingError, match="the longest request"):
        recommend(curve, Traffic(1, 1.0, longest_request=500), HARDWARE, PRICES)

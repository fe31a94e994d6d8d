"""Tokens saved and lost, and the interval around their share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.observe.shadow.comparison import (
    MAX_BATCHES,
    MIN_BATCHES,
    MIN_REQUESTS,
    Comparison,
    Verdict,
    gain_interval,
    knee,
    student_quantile,
    verdict,
)

requests = st.lists(
    st.tuples(st.integers(1, 5000), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=400
)


@given(requests)
def test_tokens_add_up_and_memory_stays_bounded(drawn: list[tuple[int, float, float]]) -> None:
    compared = Comparison()
    rows = [(tokens, int(tokens * lru), int(tokens * ours)) for tokens, lru, ours in drawn]
    for row in rows:
        compared.add(*row)
    tokens, lru, ours = (sum(column) for column in zip(*rows, strict=True))
    assert (compared.prompt_tokens, compared.lru_hit_tokens, compared.other_hit_tokens) == (
        tokens,
        lru,
        ours,
    )
    assert compared.saved_tokens - compared.lost_tokens == ours - lru
    assert compared.agreed_tokens == sum(min(row[1:]) for row in rows)
    assert len(compared.batches) < MAX_BATCHES
    size = compared._batch_requests
    whole = [rows[start : start + size] for start in range(0, len(rows) - size + 1, size)]
    assert compared.batches == [(sum(r[0] for r in part), sum(r[2] - r[1] for r in part)) for part in whole]


@pytest.mark.parametrize(("degrees", "value"), [(7, 2.365), (10, 2.228), (30, 2.042), (63, 1.998)])
def test_quantiles_are_those_of_the_tables(degrees: int, value: float) -> None:
    assert student_quantile(0.975, degrees) == pytest.approx(value, rel=0.01)


def test_whoever_looks_again_and_again_is_hardly_ever_told_a_difference_that_is_not_there() -> None:
    """Two policies that differ by luck only, in runs of some ten requests, looked at 80 times."""
    rng = np.random.default_rng(5)
    told = told_once = 0
    for _ in range(100):
        prompts = rng.integers(500, 1500, 4000)
        luck = np.convolve(rng.normal(0, 60, 4009), np.ones(10) / 10, "valid")
        compared = Comparison()
        at_any_look = False
        for number, (tokens, gained) in enumerate(zip(prompts.tolist(), luck.tolist(), strict=True), 1):
            compared.add(tokens, 200, 200 + round(gained))
            if number % 50 == 0:
                at_any_look |= verdict(compared.batches, number) in (Verdict.SAVES, Verdict.COSTS)
        told += at_any_look
        told_once += verdict(compared.batches, 4000) in (Verdict.SAVES, Verdict.COSTS)
    assert told <= 10
    assert told_once <= told


def test_a_real_difference_is_told() -> None:
    rng = np.random.default_rng(6)
    compared = Comparison()
    for gained in rng.normal(50, 200, 2000).tolist():
        compared.add(1000, 300, 300 + round(gained))
    assert verdict(compared.batches, 2000) is Verdict.SAVES


def test_correlated_requests_widen_the_interval() -> None:
    """Runs of good and of bad luck: batches see them, single requests would not."""
    rng = np.random.default_rng(3)
    luck = np.repeat(rng.normal(0, 50, 40), 100)
    compared = Comparison()
    for each in luck:
        compared.add(1000, 500, 500 + int(each))
    batched = gain_interval(compared.batches, 4000)
    single = gain_interval([(1000, int(each)) for each in luck], 4000)
    assert batched is not None
    assert single is not None
    assert batched[1] - batched[0] > 3 * (single[1] - single[0])


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        ([50, 60] * 10, Verdict.SAVES),
        ([-50, -60] * 10, Verdict.COSTS),
        ([50, -60] * 10, Verdict.EVEN),
        ([0] * 20, Verdict.EVEN),
        ([50] * (MIN_BATCHES - 1), Verdict.TOO_EARLY),
        ([], Verdict.TOO_EARLY),
    ],
)
def test_verdicts(gains: list[int], said: Verdict) -> None:
    assert verdict([(1000, gain) for gain in gains], 1000) is said
    assert verdict([(1000, gain) for gain in gains], MIN_REQUESTS - 1) is Verdict.TOO_EARLY


@pytest.mark.parametrize(
    ("hits", "bend"),
    [
        ((0, 0, 0, 0), 0),
        ((50, 100, 100, 100), 1),
        ((10, 20, 40, 80), 0),
        ((10, 20, 70, 80), 2),
        ((80, 80, 80, 80), 0),
    ],
)
def test_memory_pays_up_to_the_bend(hits: tuple[int, ...], bend: int) -> None:
    """Of one, two, four and eight pools; on a straight line the first point is as good as any."""
    assert knee((1, 2, 4, 8), hits) == bend

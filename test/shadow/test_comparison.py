"""Tokens saved and lost, and the interval around their share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.shadow.comparison import (
    MAX_BATCHES,
    MIN_BATCHES,
    Comparison,
    Verdict,
    gain_interval,
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
    assert (compared.prompt_tokens, compared.lru_hit_tokens, compared.importance_hit_tokens) == (
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


def test_an_interval_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(400):
        prompt = rng.integers(500, 1500, 40)
        gained = np.round(prompt * 0.05 + rng.normal(0, 60, 40)).astype(int)
        interval = gain_interval(list(zip(prompt.tolist(), gained.tolist(), strict=True)))
        assert interval is not None
        covered += interval[0] <= 0.05 <= interval[1]
    assert 0.91 <= covered / 400 <= 0.98


def test_correlated_requests_widen_the_interval() -> None:
    """Runs of good and of bad luck: batches see them, single requests would not."""
    rng = np.random.default_rng(3)
    luck = np.repeat(rng.normal(0, 50, 40), 100)
    compared = Comparison()
    for each in luck:
        compared.add(1000, 500, 500 + int(each))
    batched = gain_interval(compared.batches)
    single = gain_interval([(1000, int(each)) for each in luck])
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
    assert verdict([(1000, gain) for gain in gains]) is said

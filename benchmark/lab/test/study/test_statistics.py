"""Overlaps and intervals against what can be counted by hand."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance_lab.study.statistics import (
    bootstrap,
    chance_jaccard,
    jaccard,
    mean_of,
    median_of,
    ratio_of,
    top_pages,
)

sets = st.sets(st.integers(0, 9))


@given(sets, sets)
def test_jaccard_counts_members(left: set[int], right: set[int]) -> None:
    both = sum(1 for i in range(10) if i in left and i in right)
    any_ = sum(1 for i in range(10) if i in left or i in right)
    assert jaccard(left, right) == (both / any_ if any_ else 1.0)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.floats(0.01, 1))
def test_top_pages_leave_nothing_larger_out(scores: list[int], share: float) -> None:
    chosen = top_pages(np.array(scores, float), share)
    assert len(chosen) == max(1, round(share * len(scores)))
    left = [scores[i] for i in range(len(scores)) if i not in chosen]
    assert not left or min(scores[i] for i in chosen) >= max(left)


@pytest.mark.parametrize(("pages", "share"), [(10, 0.2), (12, 0.25), (8, 0.5)])
def test_chance_is_near_the_mean_over_all_sets(pages: int, share: float) -> None:
    count = round(share * pages)
    top = set(range(count))
    exact = np.mean([jaccard(top, set(other)) for other in combinations(range(pages), count)])
    assert chance_jaccard(pages, share) == pytest.approx(exact, abs=0.03)


def test_the_interval_of_a_mean_is_that_of_theory() -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(3.0, 2.0, size=400)
    estimate = mean_of(values.tolist())
    half = 1.96 * values.std() / 20
    assert estimate.value == pytest.approx(values.mean())
    assert estimate.low == pytest.approx(values.mean() - half, abs=0.05)
    assert estimate.high == pytest.approx(values.mean() + half, abs=0.05)


def test_the_interval_of_a_median_is_that_of_order_statistics() -> None:
    # Ranks 0.5 n -+ 0.98 sqrt(n) hold the median in 95 of 100 samples (binomial, normal approximation).
    estimate = median_of(range(1, 402))
    assert estimate.value == 201
    assert estimate.low == pytest.approx(201 - 0.98 * 401**0.5, abs=2)
    assert estimate.high == pytest.approx(201 + 0.98 * 401**0.5, abs=2)


@pytest.mark.parametrize("count", [1, 2, 7, 33])
def test_medians_are_drawn_as_all_others(count: int) -> None:
    values = np.random.default_rng(count).random(count)
    one_by_one = bootstrap(values[:, None], lambda table: float(np.median(table)), seed=5)
    assert median_of(values.tolist(), seed=5) == one_by_one


def test_a_ratio_divides_sums_not_means_of_ratios() -> None:
    assert ratio_of([(1, 1), (0, 9)]).value == pytest.approx(0.1)


def test_one_unit_has_no_interval() -> None:
    estimate = ratio_of([(3, 4)])
    assert (estimate.value, estimate.low, estimate.high) == (0.75, 0.75, 0.75)


def test_whole_units_are_drawn() -> None:
    # Every unit sums to 10: no resample can say anything else.
    rows = [(i, 10 - i) for i in range(10)]
    estimate = bootstrap(rows, lambda table: float(table.sum(axis=1).mean()))
    assert (estimate.low, estimate.high) == (10, 10)

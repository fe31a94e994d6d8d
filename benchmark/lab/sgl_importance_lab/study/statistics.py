"""Intervals and overlaps, small enough to be checked by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
CONFIDENCE = 0.95

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its percentile bootstrap interval.

    Attributes:
        n: units that were resampled, the smaller number where two groups were. Of one, both ends equal the
            value, which is no interval.
    """

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        if self.n < 2:
            return f"{self.value:.3f} (no interval)"
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"

    @property
    def ends(self) -> tuple[float | None, float | None]:
        """Of the interval; None where there is none."""
        return (self.low, self.high) if self.n > 1 else (None, None)

    def from_one(self) -> Estimate:
        """One minus it."""
        return Estimate(1 - self.value, 1 - self.high, 1 - self.low, self.n)


def bootstrap(
    units: Sequence[Sequence[float]] | Floats, statistic: Callable[[Floats], float], *, seed: int = 0
) -> Estimate:
    """Percentile bootstrap (Efron 1979) over independent units.

    Args:
        units: one row per unit, float [units, columns]; whole rows are drawn, with replacement.
        statistic: of such an array.
        seed: of the draws.
    """
    table = np.asarray(units, dtype=np.float64)
    assert table.ndim == 2, table.shape
    assert len(table) > 0
    rng = np.random.default_rng(seed)
    draws = [statistic(table[rng.integers(len(table), size=len(table))]) for _ in range(RESAMPLES)]
    return _estimate(statistic(table), draws, len(table))


def _estimate(value: float, draws: Sequence[float] | Floats, n: int) -> Estimate:
    low, high = np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(float(value), float(low), float(high), n)


def mean_of(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """Mean with its bootstrap interval over single values."""
    return bootstrap([[value] for value in values], lambda table: float(table[:, 0].mean()), seed=seed)


def median_of(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """Median with its bootstrap interval over single values, all drawn at once."""
    table = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(len(table), size=(RESAMPLES, len(table)))
    return _estimate(float(np.median(table)), np.median(table[drawn], axis=1), len(table))


def ratio_of(parts: Sequence[tuple[float, float]], *, seed: int = 0) -> Estimate:
    """Ratio of sums over (numerator, denominator) units, with its bootstrap interval; all drawn at once."""
    table = np.asarray(parts, dtype=np.float64)
    assert len(table) > 0
    drawn = np.random.default_rng(seed).integers(len(table), size=(RESAMPLES, len(table)))
    sums = table[drawn].sum(axis=1)
    return _estimate(ratio_of_sums(table), sums[:, 0] / np.maximum(sums[:, 1], 1e-12), len(table))


def top_pages(scores: Floats, share: float) -> set[int]:
    """The ``share`` highest-scored pages, at least one; equal scores go to the first page."""
    count = max(1, round(share * len(scores)))
    return set(np.argsort(-scores, kind="stable")[:count].tolist())


def jaccard(left: set[int], right: set[int]) -> float:
    """Size of the intersection over size of the union; 1 for two empty sets."""
    union = len(left | right)
    return len(left & right) / union if union else 1.0


def chance_jaccard(pages: int, share: float) -> float:
    """Expected Jaccard index of the top set with a random set of its size, to first order: the expected
    intersection k * k / n over the union that follows from it."""
    count = max(1, round(share * pages))
    overlap = count * count / pages
    return overlap / (2 * count - overlap)


def ratio_of_sums(table: Floats) -> float:
    """Of rows (numerator, denominator)."""
    return float(table[:, 0].sum() / max(table[:, 1].sum(), 1e-12))


def difference_of_ratios(
    first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]], *, seed: int = 0
) -> Estimate:
    """Ratio of sums of the first minus that of the second, over independent units of either."""
    draws = _drawn_differences(first, second, seed)
    return _estimate(draws[0], draws[1:], min(len(first), len(second)))


def chance_of_difference(
    first: Sequence[tuple[float, float]],
    second: Sequence[tuple[float, float]],
    holds: Callable[[float], bool],
    *,
    seed: int = 0,
) -> float:
    """``chance_of`` for the difference that ``difference_of_ratios`` estimates."""
    draws = _drawn_differences(first, second, seed)[1:]
    return (1 + sum(map(holds, draws))) / (1 + RESAMPLES)


def _drawn_differences(
    first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]], seed: int
) -> list[float]:
    """The difference itself, and those of the resamples."""
    one, other = np.asarray(first, np.float64), np.asarray(second, np.float64)
    rng = np.random.default_rng(seed)
    return [
        ratio_of_sums(one) - ratio_of_sums(other),
        *(
            ratio_of_sums(one[rng.integers(len(one), size=len(one))])
            - ratio_of_sums(other[rng.integers(len(other), size=len(other))])
            for _ in range(RESAMPLES)
        ),
    ]


def chance_of(
    units: Sequence[Sequence[float]] | Floats,
    statistic: Callable[[Floats], float],
    holds: Callable[[float], bool],
    *,
    seed: int = 0,
) -> float:
    """One-sided bootstrap p-value: share of resamples, plus one, of which ``holds`` is true."""
    table = np.asarray(units, dtype=np.float64)
    rng = np.random.default_rng(seed)
    found = sum(holds(statistic(table[rng.integers(len(table), size=len(table))])) for _ in range(RESAMPLES))
    return (1 + found) / (1 + RESAMPLES)

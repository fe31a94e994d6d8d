"""Weighted counts of values by their size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate


class Histogram:
    """Attributes:
    bounds: upper bounds of all buckets but the last, ascending; a value at a bound belongs below it.
    weights: of each bucket.
    total: sum of the values, each times its weight.
    """

    __slots__ = ("bounds", "total", "weights")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.weights = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, weight: int) -> None:
        self.weights[bisect_left(self.bounds, value)] += weight
        self.total += value * weight

    @property
    def weight(self) -> int:
        return sum(self.weights)

    def cumulative(self) -> list[int]:
        """Weight of the values up to each bound, and of all."""
        return list(accumulate(self.weights))

    def quantile(self, share: float) -> float | None:
        """The value below which this share of the weight lies; None without any.

        Linear within a bucket, and the last bound where it lies beyond, as Prometheus has it.
        """
        rank = share * self.weight
        if not rank:
            return None
        low, below = 0.0, 0
        for bound, weight in zip(self.bounds, self.weights, strict=False):
            if below + weight >= rank:
                return low + (bound - low) * (rank - below) / weight
            low, below = bound, below + weight
        return low

    @classmethod
    def merged(cls, histograms: Iterable[Histogram]) -> Histogram:
        """The sum of some with the same bounds, one at least."""
        first, *others = histograms
        merged = cls(first.bounds)
        for each in (first, *others):
            merged.weights = [a + b for a, b in zip(merged.weights, each.weights, strict=True)]
            merged.total += each.total
        return merged

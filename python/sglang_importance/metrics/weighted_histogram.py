"""A Prometheus histogram whose observations carry a weight, taken in by the bucket."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Histogram


class WeightedHistogram(Histogram):
    """The client's own, which counts each observation as one."""

    def add(self, weights: Sequence[float], total: float) -> None:
        """
        Args:
            weights: that each bucket grows by, the one without bound last.
            total: that the sum of all values grows by.
        """
        for bucket, weight in zip(self._buckets, weights, strict=True):
            if weight:
                bucket.inc(weight)
        self._sum.inc(total)

"""The open at-risk intervals of compiled replays: ``ReuseEstimator``'s two rings, as an array."""

from __future__ import annotations

import numpy as np

from sgl_importance.reuse.reached import AGES, IntervalArray


def no_intervals(num_requests: int, num_classes: int) -> IntervalArray:
    """As in ``ReuseEstimator``, with a ring of requests that is as long as this trace needs it."""
    ring = min(len(AGES.bucket_of_age), num_requests + 1)
    return np.zeros((ring + AGES.num_groups, num_classes), dtype=np.int32)

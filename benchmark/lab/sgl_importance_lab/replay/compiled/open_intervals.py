"""The open at-risk intervals of compiled replays: ``ReuseEstimator``'s two rings, as an array."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from sgl_importance.reuse.estimator import NUM_GROUPS
from sgl_importance.reuse.life_table import BUCKET_OF_AGE, BUCKET_STARTS, GROUP, FloatArray
from sgl_importance_lab.replay.trace import IntArray

IntervalArray = npt.NDArray[np.int32]
"""How many intervals are open, by when they began and by class; [ring of requests and ring of groups,
classes]."""


class Ages(NamedTuple):
    """Constants as an argument: numba would freeze globals into its cache.

    Attributes:
        bucket_starts: first age of each bucket, int64.
        bucket_of_age: of each age that is known exactly, int64.
        group: requests of a group.
        num_groups: groups that can hold an open interval.
    """

    bucket_starts: IntArray
    bucket_of_age: IntArray
    group: int
    num_groups: int


AGES = Ages(BUCKET_STARTS, BUCKET_OF_AGE, GROUP, NUM_GROUPS)


def no_intervals(num_requests: int, num_classes: int) -> IntervalArray:
    """As in ``ReuseEstimator``, with a ring of requests that is as long as this trace needs it."""
    ring = min(len(AGES.bucket_of_age), num_requests + 1)
    return np.zeros((ring + AGES.num_groups, num_classes), dtype=np.int32)


@numba.njit(cache=True)
def count_reached(clock: int, open_intervals: IntervalArray, reached: FloatArray, ages: Ages) -> None:
    """A request is admitted: open intervals that get to a bucket with it are counted there."""
    rows, num_classes = open_intervals.shape
    ring, exact = rows - ages.num_groups, len(ages.bucket_of_age)
    leaving = clock - exact
    if leaving >= 0:
        group = ring + leaving // ages.group % ages.num_groups
        if leaving % ages.group == 0:
            open_intervals[group] = 0
        for row in range(num_classes):
            open_intervals[group, row] += open_intervals[clock % ring, row]
    open_intervals[clock % ring] = 0
    for bucket in range(len(ages.bucket_starts)):
        start = clock - ages.bucket_starts[bucket]
        if start <= 0:
            break
        if ages.bucket_starts[bucket] < exact:
            began = start % ring
        elif (start + 1) % ages.group == 0:
            began = ring + start // ages.group % ages.num_groups
        else:
            break  # all other buckets begin whole groups later
        for row in range(num_classes):
            reached[row, bucket] += open_intervals[began, row]

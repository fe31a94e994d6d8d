"""Open at-risk intervals that get to an age bucket with a request. Compiled: it runs at each admission."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from sgl_importance.reuse.life_table import (
    BUCKET_OF_AGE,
    BUCKET_STARTS,
    GROUP,
    NUM_GROUPS,
    FloatArray,
    IntArray,
)
from sgl_importance_kernels.jit import njit

IntervalArray = npt.NDArray[np.int32]
"""How many intervals are open, by when they began and by class; [ring of requests and ring of groups,
classes]."""


class AgeTable(NamedTuple):
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


AGES = AgeTable(BUCKET_STARTS, BUCKET_OF_AGE, GROUP, NUM_GROUPS)
_AGES = numba.typeof(AGES)  # type: ignore[no-untyped-call]


@njit(numba.void(numba.int64, numba.int32[:, ::1], numba.float64[:, ::1], _AGES))
def count_reached(clock: int, open_intervals: IntervalArray, reached: FloatArray, ages: AgeTable) -> None:
    """A request is admitted: open intervals that get to a bucket with it are counted there.

    Args:
        clock: of the request.
        open_intervals: those that began ``len(ages.bucket_of_age)`` requests ago move to their group.
        reached: float64 [classes, buckets].
        ages: ``AGES``.
    """
    rows, num_classes = open_intervals.shape
    ring, exact = rows - ages.num_groups, len(ages.bucket_of_age)
    leaving = clock - exact
    if leaving >= 0:
        group = ring + leaving // ages.group % ages.num_groups
        if leaving % ages.group == 0:
            open_intervals[group] = 0  # what began one round of the ring before has passed MAX_AGE
        for row in range(num_classes):
            open_intervals[group, row] += open_intervals[clock % ring, row]
    open_intervals[clock % ring] = 0
    for bucket in range(len(ages.bucket_starts)):
        start = clock - ages.bucket_starts[bucket]
        if start <= 0:
            break
        if ages.bucket_starts[bucket] < exact:
            began = start % ring
        elif (start + 1) % ages.group == 0:  # else no group's last request gets to a bucket
            began = ring + start // ages.group % ages.num_groups
        else:
            break  # all other buckets begin whole groups later
        for row in range(num_classes):
            reached[row, bucket] += open_intervals[began, row]

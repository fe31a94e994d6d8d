"""Open at-risk intervals that get to an age bucket. Compiled: it runs with each admission and answer."""

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
_VECTOR, _NUMBERS = numba.float64[::1], numba.int64[::1]
_ROWS = numba.float64[:, ::1]


@njit(numba.void(numba.int64, numba.int32[:, ::1], _ROWS, _AGES))
def count_reached(clock: int, open_intervals: IntervalArray, reached: FloatArray, ages: AgeTable) -> None:
    """A request is admitted: open intervals that get to a bucket with it are counted there.

    Args:
        clock: of the request.
        open_intervals: those that began ``len(ages.bucket_of_age)`` requests ago move to their group.
        reached: float64 [classes, buckets], of the first classes: no others have occurred.
        ages: ``AGES``.
    """
    num_classes = len(reached)
    ring, exact = len(open_intervals) - ages.num_groups, len(ages.bucket_of_age)
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


@njit(numba.void(numba.float64, _VECTOR, _NUMBERS, _NUMBERS, _ROWS, _VECTOR))
def count_turns_reached(
    now: float,
    since: FloatArray,
    classes: IntArray,
    following: IntArray,
    reached: FloatArray,
    bucket_starts: FloatArray,
) -> None:
    """Time goes on: open intervals of turns that get to a bucket by now are counted there.

    Args:
        now: by the clock of ``since``.
        since: when each interval began, ascending.
        classes: of each; below 0 where it has ended.
        following: of each bucket the first interval that has not got to it, which is moved on; in place of
            the first bucket, which an interval begins in, how many there are.
        reached: float64 [classes, buckets].
        bucket_starts: first age of each bucket.
    """
    for bucket in range(1, len(bucket_starts)):
        number = following[bucket]
        while number < following[0] and since[number] + bucket_starts[bucket] <= now:
            if classes[number] >= 0:
                reached[classes[number], bucket] += 1.0
            number += 1
        following[bucket] = number

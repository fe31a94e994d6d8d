"""Ages of a life table: buckets of admitted requests since a visit, a few to each doubling."""

from __future__ import annotations

from bisect import bisect_right
from functools import cache

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

BUCKETS_PER_OCTAVE = 3
EXACT_AGE = 2**15
"""Age from which on at-risk intervals are known by the group of requests in which they began."""
GROUP = 2**10
"""Requests of such a group: it divides ``EXACT_AGE``, and all starts of buckets from there on."""
MAX_AGE = 2**18
"""Admitted requests after which an at-risk interval is given up."""
NUM_GROUPS = (MAX_AGE - EXACT_AGE) // GROUP + 1
"""Groups of requests that can hold an open interval."""


def _bucket_starts() -> IntArray:
    octaves = int(np.log2(MAX_AGE))
    starts = np.round(2.0 ** (np.arange(BUCKETS_PER_OCTAVE * octaves) / BUCKETS_PER_OCTAVE))
    starts = np.where(starts < EXACT_AGE, starts, GROUP * np.round(starts / GROUP))
    return np.unique(starts.astype(np.int64))


BUCKET_STARTS = _bucket_starts()
"""First age of each bucket, in admitted requests; int64, from 1 on. The last bucket has no end."""
NUM_AGE_BUCKETS = len(BUCKET_STARTS)
NUM_EXACT_BUCKETS = int(np.searchsorted(BUCKET_STARTS, EXACT_AGE))
"""Buckets of ages below ``EXACT_AGE``; the next one begins there."""
BUCKET_OF_AGE: IntArray = (
    np.searchsorted(BUCKET_STARTS, np.maximum(np.arange(EXACT_AGE), 1), side="right") - 1
)
"""Bucket of each age below ``EXACT_AGE``; 0 counts as 1; int64 [EXACT_AGE]."""
_BUCKET_LIST: list[int] = BUCKET_OF_AGE.tolist()  # indexing a list is faster than an array
_START_LIST: list[int] = BUCKET_STARTS.tolist()


def age_bucket(age: int) -> int:
    """The bucket of an age in admitted requests; 0 counts as 1."""
    return _BUCKET_LIST[age] if age < EXACT_AGE else bisect_right(_START_LIST, age) - 1


@cache
def bucket_widths(num_buckets: int = NUM_AGE_BUCKETS) -> FloatArray:
    """Ages in each of the first buckets; float64 [num_buckets]. The last one has no end and counts as wide as
    it is old."""
    starts = BUCKET_STARTS[:num_buckets]
    return np.append(np.diff(starts), starts[-1]).astype(np.float64)


BUCKET_WIDTHS = bucket_widths()

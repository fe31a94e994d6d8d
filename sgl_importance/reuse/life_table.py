"""Ages of a life table: buckets of admitted requests since a visit, a few to each doubling."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

BUCKETS_PER_OCTAVE = 3
MAX_AGE = 2**15
"""Admitted requests after which an at-risk interval is given up."""


def _bucket_starts() -> IntArray:
    octaves = int(np.log2(MAX_AGE))
    starts = np.round(2.0 ** (np.arange(BUCKETS_PER_OCTAVE * octaves) / BUCKETS_PER_OCTAVE))
    return np.unique(starts.astype(np.int64))


BUCKET_STARTS = _bucket_starts()
"""First age of each bucket, in admitted requests; int64, from 1 on. The last bucket has no end."""
NUM_AGE_BUCKETS = len(BUCKET_STARTS)
BUCKET_WIDTHS: FloatArray = np.append(np.diff(BUCKET_STARTS), BUCKET_STARTS[-1]).astype(np.float64)
BUCKET_OF_AGE: IntArray = np.searchsorted(BUCKET_STARTS, np.maximum(np.arange(MAX_AGE), 1), side="right") - 1
"""Bucket of each age below ``MAX_AGE``, where the last one has begun; 0 counts as 1; int64 [MAX_AGE]."""
_BUCKET_LIST: list[int] = BUCKET_OF_AGE.tolist()  # indexing a list is faster than an array


def age_bucket(age: int) -> int:
    """The bucket of an age in admitted requests; 0 counts as 1."""
    return _BUCKET_LIST[age] if age < MAX_AGE else NUM_AGE_BUCKETS - 1

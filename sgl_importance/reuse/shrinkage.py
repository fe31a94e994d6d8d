"""What chance explains is taken out of estimated hazards. Compiled.

A few hundred intervals over some forty ages make a hazard that goes up and down by chance, and an order of
victims that follows it is worse than recency. So hazards are drawn towards what is simpler, by as much of the
difference as chance may explain (after the positive part of James and Stein, 1961): those of all intervals
towards a trend that only falls with age, and those of a class towards what its prior says.
"""

from __future__ import annotations

import numba
import numpy as np

from sgl_importance.reuse.life_table import FloatArray
from sgl_importance_kernels.jit import njit

DEVIATIONS = 2.0
"""Standard deviations of chi-square above its mean that count as chance."""
LEAST_EXPECTED = 0.5
"""Hits that a bucket must lead to expect for its difference to be looked at."""
CERTAIN = 1.0 - 1e-9
"""A hazard counts as no higher: its rate would have no end."""
_VECTOR = numba.float64[::1]


@njit(numba.void(_VECTOR, _VECTOR, _VECTOR, _VECTOR))
def shrink(hazard: FloatArray, simpler: FloatArray, hits: FloatArray, reached: FloatArray) -> None:
    """Draws ``hazard`` towards ``simpler``, in place.

    Args:
        hazard: of each age bucket, as estimated; float64 [buckets].
        simpler: what it would be; float64 [buckets].
        hits: intervals that ended in the bucket; float64 [buckets].
        reached: intervals that got as far; float64 [buckets].
    """
    squares, buckets = 0.0, 0  # chi-square and its degrees of freedom
    for bucket in range(len(hazard)):
        expected = reached[bucket] * simpler[bucket]
        if expected >= LEAST_EXPECTED and simpler[bucket] < CERTAIN:
            squares += (hits[bucket] - expected) ** 2 / (expected * (1.0 - simpler[bucket]))
            buckets += 1
    by_chance = buckets + DEVIATIONS * np.sqrt(2.0 * buckets)
    beyond_chance = 1.0 - by_chance / squares if squares > by_chance else 0.0
    for bucket in range(len(hazard)):
        hazard[bucket] = simpler[bucket] + beyond_chance * (hazard[bucket] - simpler[bucket])


@njit(_VECTOR(_VECTOR, _VECTOR, _VECTOR))
def falling_trend(hazard: FloatArray, reached: FloatArray, widths: FloatArray) -> FloatArray:
    """The nearest hazards whose rate per request never rises with age (isotonic regression; pool adjacent
    violators, Ayer et al., 1955).

    Args:
        hazard: of each age bucket; float64 [buckets].
        reached: what each weighs, in intervals; float64 [buckets], above 0.
        widths: requests in each bucket; float64 [buckets].

    Returns:
        float64 [buckets].
    """
    num_buckets = len(hazard)
    # Of each run of buckets so far that has one rate: the rate, its weight, and the first bucket.
    rate, weight = np.empty(num_buckets), np.empty(num_buckets)
    first = np.empty(num_buckets + 1, dtype=np.int64)
    runs = 0
    for bucket in range(num_buckets):
        rate[runs] = -np.log1p(-min(hazard[bucket], CERTAIN)) / widths[bucket]
        weight[runs], first[runs] = reached[bucket] * widths[bucket], bucket
        while runs and rate[runs - 1] < rate[runs]:
            both = weight[runs - 1] + weight[runs]
            rate[runs - 1] = (rate[runs - 1] * weight[runs - 1] + rate[runs] * weight[runs]) / both
            weight[runs - 1] = both
            runs -= 1
        runs += 1
    first[runs] = num_buckets
    trend = np.empty(num_buckets)
    for run in range(runs):
        for bucket in range(first[run], first[run + 1]):
            trend[bucket] = -np.expm1(-rate[run] * widths[bucket])
    return trend

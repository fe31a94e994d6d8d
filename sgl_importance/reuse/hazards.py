"""Hazards by class and age from the evidence, and the retention index that follows. Compiled.

Classes share data: a class's hazard starts as the hazard of all nodes times a ratio (proportional hazards,
Cox 1972), and leaves that prior as its own evidence grows. The ratio is the class's own hits to those
expected. It starts as the ratio of all classes of its visit level, and that doubles from level to level until
there is evidence. Where the gap between visits is known, the prior is the rate that these visits suggest. So
before anything is learnt a node visited more often goes later, as under LFU, and one visited earlier goes
sooner, as under LRU; evidence moves first the levels, then the classes.

Nodes are ranked by the *retention index*: the most reuses per admitted request that keeping the node
can earn, over all times at which one could give it up. It is Gittins' index (1979) of the stopping problem
"hold this node until its next visit, or give up": hit density (LHD, Beckmann, Chen, Cidon, NSDI 2018) with
the best horizon instead of an endless one. A node that is never visited within 100 requests and often
after 200 gains worth while it waits, so the ranking is not monotone in age.

A few hundred intervals over some forty ages make a hazard that goes up and down by chance, and an order of
victims that follows it is worse than recency. So hazards are drawn towards what is simpler, by as much of the
difference as chance may explain (after the positive part of James and Stein, 1961): those of all intervals
towards a trend that only falls with age, and those of a class towards what its prior says.

All that is compiled stands in this file: numba's cache does not see when another one changes.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from sgl_importance.reuse.life_table import BUCKET_STARTS, BUCKET_WIDTHS, FloatArray, IntArray, bucket_widths
from sgl_importance.reuse.reuse_class import GAP_STARTS, NUM_COUNTED_LEVELS, VISIT_STARTS
from sgl_importance_kernels.jit import njit

DEVIATIONS = 2.0
"""Standard deviations of chi-square above its mean that count as chance."""
LEAST_EXPECTED = 0.5
"""Hits that a bucket must lead to expect for its difference to be looked at."""
CERTAIN = 1.0 - 1e-9
"""A hazard counts as no higher: its rate would have no end."""


def _gap_hazards() -> FloatArray:
    visits = VISIT_STARTS[-1]
    span = visits * GAP_STARTS[0] / 2 * 4.0 ** np.arange(len(GAP_STARTS) + 1)[:, None]
    ends = BUCKET_STARTS + BUCKET_WIDTHS
    hazard: FloatArray = 1.0 - ((span + BUCKET_STARTS) / (span + ends)) ** visits
    return hazard


class Priors(NamedTuple):
    """Priors of the hazard estimate.

    Handed to compiled functions as an argument: numba would freeze globals into its cache.

    Attributes:
        hazard: of every bucket. Buckets widen with age, so without evidence nodes of one level are ranked as
            under LRU.
        hazard_strength: intervals that ``hazard`` is worth for all classes together, per bucket.
        level_ratios: a counted visit level's hazard relative to that of all nodes; float64
            [NUM_COUNTED_LEVELS].
        ratio_strength: expected hits that ``level_ratios`` are worth, and "a class equals its level".
        class_strength: intervals that a class's proportional hazard is worth, per bucket.
        gap_hazards: P(visit in a bucket) of a node that was visited eight times, with the middle of a
            division of GAP_STARTS as its mean gap (the middles quadruple); float64 [divisions, buckets]. A
            Poisson process whose rate is known from no more than these visits (gamma posterior): one that
            stays away is believed to visit less and less often.
        gap_strength: intervals that ``gap_hazards`` are worth, per bucket.
        is_shrunk: whether what chance explains is taken out (``shrink``). Turns gain by it while
            there are few; classes of nodes lose (docs/decisions/036-chance-is-taken-out-of-turns.md).
    """

    hazard: float
    hazard_strength: float
    level_ratios: FloatArray
    ratio_strength: float
    class_strength: float
    gap_hazards: FloatArray
    gap_strength: float
    is_shrunk: bool


PRIORS = Priors(
    hazard=0.05,
    hazard_strength=4.0,
    level_ratios=0.5 * 2.0 ** np.arange(NUM_COUNTED_LEVELS, dtype=np.float64),
    ratio_strength=2.0,
    class_strength=0.5,
    gap_hazards=_gap_hazards(),
    gap_strength=1.0,
    is_shrunk=False,
)
_LESS = 1.0 - 1e-9
"""Clearly less, whatever was rounded."""
_ROWS, _VECTOR = numba.float64[:, ::1], numba.float64[::1]
_PRIORS = numba.typeof(PRIORS)  # type: ignore[no-untyped-call]


def hazards(hits: FloatArray, reached: FloatArray, levels: IntArray, priors: Priors = PRIORS) -> FloatArray:
    """Posterior mean hazards.

    Args:
        hits: intervals that ended with a visit, by class and age bucket; float64 [classes, buckets]. A row of
            zeros is a class without evidence. Buckets are the first of BUCKET_STARTS, or all.
        reached: intervals that got as far as the bucket; float64 [classes, buckets].
        levels: visit level of each class; int64 [classes].
        priors: of the estimate.

    Returns:
        P(visit in the bucket | not before), float64 [classes, buckets], in (0, 1].
    """
    hazard: FloatArray = _hazards(hits, reached, levels, priors, bucket_widths(hits.shape[1]))
    return hazard


def retention_index(hazard: FloatArray) -> FloatArray:
    """Most reuses per admitted request that keeping a node can earn, by its age bucket.

    index(a) = max over b >= a of P(visit in buckets a..b) / E[requests until the visit or the end of b];
    a visit inside a bucket counts at its middle.

    Args:
        hazard: of the first of BUCKET_STARTS, or of all; float64 [classes, buckets].

    Returns:
        float64 [classes, buckets], above 0.
    """
    index: FloatArray = _retention_index(hazard, bucket_widths(hazard.shape[1]))
    return index


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


@njit(_ROWS(_ROWS, _ROWS, numba.int64[::1], _PRIORS, _VECTOR))
def _hazards(
    hits: FloatArray, reached: FloatArray, levels: IntArray, priors: Priors, widths: FloatArray
) -> FloatArray:
    num_classes, num_buckets = hits.shape
    num_counted = len(priors.level_ratios)
    pooled, all_hits, all_reached = np.empty(num_buckets), np.zeros(num_buckets), np.zeros(num_buckets)
    for bucket in range(num_buckets):
        for row in range(num_classes):
            all_hits[bucket] += hits[row, bucket]
            all_reached[bucket] += reached[row, bucket]
        pooled[bucket] = (all_hits[bucket] + priors.hazard_strength * priors.hazard) / (
            all_reached[bucket] + priors.hazard_strength
        )
    if priors.is_shrunk:
        trend = falling_trend(pooled, all_reached + priors.hazard_strength, widths)
        shrink(pooled, trend, all_hits, all_reached)
    observed, expected = np.zeros(num_classes), np.zeros(num_classes)
    level_observed, level_expected = np.zeros(num_counted), np.zeros(num_counted)
    for row in range(num_classes):
        for bucket in range(num_buckets):
            observed[row] += hits[row, bucket]
            expected[row] += reached[row, bucket] * pooled[bucket]
        if levels[row] < num_counted:
            level_observed[levels[row]] += observed[row]
            level_expected[levels[row]] += expected[row]
    level_ratio = (level_observed + priors.ratio_strength * priors.level_ratios) / (
        level_expected + priors.ratio_strength
    )
    posterior = np.empty_like(hits)
    for row in range(num_classes):
        level = levels[row]
        if level < num_counted:
            strength = priors.class_strength
            ratio = (observed[row] + priors.ratio_strength * level_ratio[level]) / (
                expected[row] + priors.ratio_strength
            )
            prior = strength * ratio * pooled
        else:
            strength = priors.gap_strength
            prior = strength * priors.gap_hazards[level - num_counted]
        for bucket in range(num_buckets):
            posterior[row, bucket] = min(
                (hits[row, bucket] + prior[bucket]) / (reached[row, bucket] + strength), 1.0
            )
        if priors.is_shrunk:
            shrink(posterior[row], np.minimum(prior / strength, 1.0), hits[row], reached[row])
    return posterior


@njit(_ROWS(_ROWS, _VECTOR))
def _retention_index(hazard: FloatArray, widths: FloatArray) -> FloatArray:
    num_classes, num_buckets = hazard.shape
    index = np.empty_like(hazard)
    for row in range(num_classes):
        for start in range(num_buckets - 1, -1, -1):
            best, survival, kept = 0.0, 1.0, 0.0
            for end in range(start, num_buckets):
                visit = survival * hazard[row, end]
                survival -= visit
                kept += (survival + 0.5 * visit) * widths[end]
                best = max(best, (1.0 - survival) / kept)
                # What follows earns no more than its own index, so going on could not raise the ratio.
                if end + 1 < num_buckets and index[row, end + 1] < _LESS * best:
                    break
            index[row, start] = best
    return index

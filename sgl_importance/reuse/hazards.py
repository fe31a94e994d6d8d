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
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from sgl_importance.reuse.life_table import BUCKET_STARTS, BUCKET_WIDTHS, FloatArray, IntArray, bucket_widths
from sgl_importance.reuse.reuse_class import GAP_STARTS, NUM_COUNTED_LEVELS, VISIT_STARTS
from sgl_importance.reuse.shrinkage import falling_trend, shrink
from sgl_importance_kernels.jit import njit


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
        is_shrunk: whether what chance explains is taken out (``reuse.shrinkage``). Turns gain by it while
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

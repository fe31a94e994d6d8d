"""Hazards by class and age out of what was counted, and what keeping a node of that age can earn.

Classes share data: a class's hazard starts as the hazard of all nodes times a ratio (proportional hazards,
Cox 1972), and leaves that prior as its own evidence grows. The ratio is the class's own hits to those
expected. It starts as the ratio of all classes of its visit level, and that doubles from level to level until
there is evidence. Where the gap between visits is known, the prior is the rate that these visits suggest. So
before anything is learnt a node visited more often goes later, as under LFU, and one visited earlier goes
sooner, as under LRU; evidence moves first the levels, then the classes.

What to keep is ranked by the *retention index*: the most reuses per admitted request that keeping the node
can earn, over all times at which one could give it up. It is Gittins' index (1979) of the stopping problem
"hold this node until its next visit, or give up": hit density (LHD, Beckmann, Chen, Cidon, NSDI 2018) with
the best horizon instead of an endless one. A node that is never visited within 100 requests and often
after 200 gains worth while it waits, so the ranking is not monotone in age.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sgl_importance.reuse_class import GAP_STARTS, NUM_COUNTED_LEVELS, NUM_VISIT_LEVELS, VISIT_STARTS

FloatArray = npt.NDArray[np.float64]

BUCKETS_PER_OCTAVE = 3
MAX_AGE = 2**15
"""Admitted requests after which a watch is given up."""
PRIOR_HAZARD = 0.05
"""Of every bucket. Buckets widen with age, so without evidence nodes of one level are ranked like LRU."""
PRIOR_STRENGTH = 4.0
"""Watches that the prior hazard of all classes together is worth, per bucket."""
LEVEL_RATIOS: FloatArray = 0.5 * 2.0 ** np.arange(NUM_COUNTED_LEVELS, dtype=np.float64)
"""What a visit level's hazard is believed to be, relative to that of all nodes, before it has evidence."""
RATIO_STRENGTH = 2.0
"""Expected hits that this belief is worth, and the belief "this class is like all others of its level"."""
CLASS_STRENGTH = 0.5
"""Watches that a class's proportional hazard is worth, per bucket."""
GAP_STRENGTH = 1.0
"""Watches that the hazard of a known gap is worth, per bucket."""


def _bucket_starts() -> npt.NDArray[np.int64]:
    octaves = int(np.log2(MAX_AGE))
    starts = np.round(2.0 ** (np.arange(BUCKETS_PER_OCTAVE * octaves) / BUCKETS_PER_OCTAVE))
    return np.unique(starts.astype(np.int64))


BUCKET_STARTS = _bucket_starts()
"""First age of each bucket, in admitted requests; int64, from 1 on. The last bucket has no end."""
NUM_AGE_BUCKETS = len(BUCKET_STARTS)
BUCKET_WIDTHS: FloatArray = np.append(np.diff(BUCKET_STARTS), BUCKET_STARTS[-1]).astype(np.float64)


def _gap_hazards() -> FloatArray:
    visits = VISIT_STARTS[-1]
    span = visits * GAP_STARTS[0] / 2 * 4.0 ** np.arange(len(GAP_STARTS) + 1)[:, None]
    ends = BUCKET_STARTS + BUCKET_WIDTHS
    hazard: FloatArray = 1.0 - ((span + BUCKET_STARTS) / (span + ends)) ** visits
    return hazard


GAP_HAZARDS = _gap_hazards()
"""P(visit in a bucket) of a node that was visited eight times, with the middle of a division of GAP_STARTS as
its mean gap (the middles quadruple); float64 [divisions, buckets]. A Poisson process whose rate is known from
no more than these visits (gamma posterior): one that stays away is believed to visit less and less often."""
_BUCKET_OF_AGE: npt.NDArray[np.int64] = (
    np.searchsorted(BUCKET_STARTS, np.maximum(np.arange(MAX_AGE), 1), side="right") - 1
)
_BUCKET_LIST: list[int] = _BUCKET_OF_AGE.tolist()  # indexing a list is faster than an array


def age_bucket(age: int) -> int:
    """The bucket of an age in admitted requests; 0 counts as 1."""
    return _BUCKET_LIST[age] if age < MAX_AGE else NUM_AGE_BUCKETS - 1


def hazards(hits: FloatArray, reached: FloatArray, levels: npt.NDArray[np.int64]) -> FloatArray:
    """Posterior mean hazards.

    Args:
        hits: watches that ended with a visit, by class and age bucket; float64 [classes, buckets].
        reached: watches that got as far as the bucket; float64 [classes, buckets].
        levels: visit level of each class; int64 [classes].

    Returns:
        P(visit in the bucket | not before), float64 [classes + NUM_VISIT_LEVELS, buckets], in (0, 1]; the
        last rows are what a class without evidence is given, by its visit level.
    """
    pooled = (hits.sum(axis=0) + PRIOR_STRENGTH * PRIOR_HAZARD) / (reached.sum(axis=0) + PRIOR_STRENGTH)
    observed = np.zeros(len(hits))
    expected = np.zeros(len(hits))
    for bucket in range(hits.shape[1]):
        observed += hits[:, bucket]
        expected += reached[:, bucket] * pooled[bucket]
    level_observed = np.bincount(levels, observed, NUM_VISIT_LEVELS)[:NUM_COUNTED_LEVELS]
    level_expected = np.bincount(levels, expected, NUM_VISIT_LEVELS)[:NUM_COUNTED_LEVELS]
    level_ratio = (level_observed + RATIO_STRENGTH * LEVEL_RATIOS) / (level_expected + RATIO_STRENGTH)

    unknown = np.zeros((NUM_VISIT_LEVELS, hits.shape[1]))
    hits, reached = np.concatenate((hits, unknown)), np.concatenate((reached, unknown))
    observed = np.concatenate((observed, np.zeros(NUM_VISIT_LEVELS)))
    expected = np.concatenate((expected, np.zeros(NUM_VISIT_LEVELS)))
    levels = np.concatenate((levels, np.arange(NUM_VISIT_LEVELS)))

    counted = levels < NUM_COUNTED_LEVELS
    prior = np.empty_like(hits)
    ratio = (observed[counted] + RATIO_STRENGTH * level_ratio[levels[counted]]) / (
        expected[counted] + RATIO_STRENGTH
    )
    prior[counted] = CLASS_STRENGTH * ratio[:, None] * pooled
    prior[~counted] = GAP_STRENGTH * GAP_HAZARDS[levels[~counted] - NUM_COUNTED_LEVELS]
    strength = np.where(counted, CLASS_STRENGTH, GAP_STRENGTH)[:, None]
    posterior: FloatArray = np.minimum((hits + prior) / (reached + strength), 1.0)
    return posterior


def retention_index(hazard: FloatArray) -> FloatArray:
    """Most reuses per admitted request that keeping a node can earn, by its age bucket.

    index(a) = max over b >= a of P(visit in buckets a..b) / E[requests until the visit or the end of b];
    a visit inside a bucket counts at its middle.

    Args:
        hazard: float64 [classes, buckets].

    Returns:
        float64 [classes, buckets], above 0.
    """
    best = np.zeros_like(hazard)
    survival = np.ones_like(hazard)
    kept = np.zeros_like(hazard)
    for end in range(hazard.shape[1]):
        starts = slice(0, end + 1)
        visit = survival[:, starts] * hazard[:, end, None]
        remaining = survival[:, starts] - visit
        kept[:, starts] += (remaining + 0.5 * visit) * BUCKET_WIDTHS[end]
        survival[:, starts] = remaining
        np.maximum(best[:, starts], (1.0 - remaining) / kept[:, starts], out=best[:, starts])
    return best

"""Will this node be asked for again, and how soon? A Beta-Bernoulli life table per class of nodes.

Every visit of a node starts a *watch*, which ends with the next visit. Of each class we count, per age
bucket, the watches that reached the bucket and those that ended in it: the hazard of a bucket is a Beta
posterior mean. Watches still open count where they got to (they are censored, not lost), so an eviction
takes nothing from what is learnt, and what is learnt does not depend on the size of the cache.

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

from bisect import bisect_right
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


class BlockType(IntEnum):
    """What a node holds."""

    USER = 0
    """Prompt text of one session: a user's words or a document."""
    SHARED_PREFIX = 1
    """Prompt text from which several continuations departed."""
    TOOL_OUTPUT = 2
    """Prompt text that a tool produced. Only hints say so."""
    GENERATED = 3
    """Text of the model."""
    PARTIAL = 4
    """A block that its prompt filled only in part: only the same prompt can hit it. A server whose cache
    keeps whole pages has none."""


class Transition(IntEnum):
    """How the last request that visited a node related to what was known before it."""

    COLD = 0
    """Nothing of the prompt was known."""
    NEW_SESSION = 1
    """It departed where others had departed before: a new session on a shared prefix."""
    BRANCH = 2
    """It departed inside what one session had brought: an edit, a retry, or the second user of a prefix."""
    NEXT_TURN = 3
    """It went on where an earlier request had ended."""
    TOOL_CALL = 4
    """As NEXT_TURN, with a tool's answer. Only hints say so."""


VISIT_STARTS = (1, 2, 4, 8)
"""First number of visits of each level but the lowest; the last of them is divided further."""
GAP_STARTS = (4, 16, 64, 256, 1024)
"""First mean number of requests between visits of each division of the last level, but the lowest. Eight
visits tell how often a node is asked for; how many more there were says little."""
NUM_VISIT_LEVELS = len(VISIT_STARTS) + 1 + len(GAP_STARTS)
NUM_COUNTED_LEVELS = len(VISIT_STARTS)
"""Levels below this one count visits; the others are told apart by the gaps between them."""
NUM_TRANSITIONS = len(Transition)  # asking an enumeration for it takes longer than the rest of a class number
NUM_CLASSES = len(BlockType) * NUM_TRANSITIONS * NUM_VISIT_LEVELS

BUCKETS_PER_OCTAVE = 3
MAX_AGE = 2**15
"""Admitted requests after which a watch is given up."""
REFRESH_INTERVAL = 16
"""Admitted requests between two computations of the index."""
MAX_EVENTS = 2**10
"""Events that are written down before they are accounted for, whoever waits."""
HALF_LIFE = 2**13
"""Admitted requests after which evidence counts half, so that the estimate follows the traffic."""
DECAY = 0.5 ** (REFRESH_INTERVAL / HALF_LIFE)
"""Of the evidence at each of these computations."""
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


def visit_level(accesses: int, span: int) -> int:
    """How well known a node is, in [0, NUM_VISIT_LEVELS).

    Args:
        accesses: admitted requests that found it in the cache, or would have found it.
        span: admitted requests between its first visit and its last.
    """
    level = bisect_right(VISIT_STARTS, accesses)
    return level if level < len(VISIT_STARTS) else level + bisect_right(GAP_STARTS, span / accesses)


def reuse_class(block_type: BlockType, transition: Transition, level: int) -> int:
    """Number of the class whose history predicts a node, in [0, NUM_CLASSES).

    Args:
        block_type: what the node holds.
        transition: how the last request got to it.
        level: its ``visit_level``.
    """
    return (block_type * NUM_TRANSITIONS + transition) * NUM_VISIT_LEVELS + level


def transition_of(reuse_class: int) -> Transition:
    """The transition that a class number was made of."""
    return Transition(reuse_class // NUM_VISIT_LEVELS % NUM_TRANSITIONS)


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


class _Event(NamedTuple):
    """What happened and is not accounted for yet.

    Attributes:
        clock: where a watch began or, with no class, when a request was admitted.
        reuse_class: class of the watch; -1 where a request was admitted.
        watches: by how much the number of open watches changes.
        ended_at: age bucket of the visit that ended it; -1 where none did.
    """

    clock: int
    reuse_class: int = -1
    watches: int = 0
    ended_at: int = -1


class ReuseEstimator:
    """Reuse of nodes by class and age, learnt online. The clock counts admitted requests.

    Each method that ends a watch needs only the class under which it began and its start: no record of
    single watches is kept, whatever their number.

    A first token waits while its request is admitted, so what happens is only written down, and accounted for
    in the same order when somebody reads what depends on it, or calls ``settle`` when nobody waits.
    """

    def __init__(self) -> None:
        self.clock = 0
        self.version = 0
        """Grows whenever the index changes."""
        self._events: list[_Event] = []
        self._open = np.zeros((MAX_AGE, NUM_CLASSES), dtype=np.int32)  # open watches by start, a ring
        self._hits = np.zeros((NUM_CLASSES, NUM_AGE_BUCKETS))
        self._reached = np.zeros((NUM_AGE_BUCKETS, NUM_CLASSES))  # as the ring: requests add rows
        self._index: list[list[float]] = []
        self._probabilities: list[list[float]] = []
        self._hazards: FloatArray = np.empty(0)
        self._computed_version = -1
        self.refresh()

    def tick(self) -> int:
        """One more request is admitted; returns the new clock."""
        self.clock += 1
        self._events.append(_Event(self.clock))
        if self.clock % REFRESH_INTERVAL == 0:
            self.version += 1
        if len(self._events) > MAX_EVENTS:
            self.settle()
        return self.clock

    def began(self, reuse_class: int) -> None:
        """A node of this class was visited or made now: a watch begins."""
        self._events.append(_Event(self.clock, reuse_class, 1))

    def resumed(self, reuse_class: int, start: int) -> None:
        """A watch that began at clock ``start`` goes on twice: its node was cut in two."""
        if self.clock - start < MAX_AGE:
            self._events.append(_Event(start, reuse_class, 1))

    def hit(self, reuse_class: int, start: int) -> None:
        """A watch that began at clock ``start`` ends with a visit."""
        age = self.clock - start
        self._events.append(_Event(start, reuse_class, -1 if age < MAX_AGE else 0, age_bucket(age)))

    def forgotten(self, reuse_class: int, start: int) -> None:
        """A watch ends without an outcome: the next visit could not be recognised any more."""
        if self.clock - start < MAX_AGE:
            self._events.append(_Event(start, reuse_class, -1))

    def reclassified(self, old_class: int, new_class: int, start: int) -> None:
        """More became known of a node: its watch goes on in another class."""
        self.forgotten(old_class, start)
        self.resumed(new_class, start)

    def settle(self) -> None:
        """Accounts for what was only written down; reads do it by themselves where they depend on it."""
        events, self._events = self._events, []
        for event in events:
            if event.reuse_class < 0:
                self._admitted(event.clock)
                continue
            if event.ended_at >= 0:
                self._hits[event.reuse_class, event.ended_at] += 1.0
            self._open[event.clock % MAX_AGE, event.reuse_class] += event.watches

    def _admitted(self, clock: int) -> None:
        self._open[clock % MAX_AGE] = 0  # whatever began there is older than we look
        reachable = int(np.searchsorted(BUCKET_STARTS, clock))
        starts = (clock - BUCKET_STARTS[:reachable]) % MAX_AGE
        self._reached[:reachable] += self._open.take(starts, axis=0)
        if clock % REFRESH_INTERVAL == 0:
            self._hits *= DECAY
            self._reached *= DECAY
            if self.clock - clock < REFRESH_INTERVAL:  # nobody asked for what an earlier one would give
                self._compute()

    def forget_open(self) -> None:
        """Every open watch ends without an outcome."""
        self.settle()
        self._open[:] = 0

    def open_watches(self) -> npt.NDArray[np.int32]:
        """Watches without an outcome yet by start, a ring, and class; int32 [MAX_AGE, NUM_CLASSES]."""
        self.settle()
        return self._open

    def counts(self) -> tuple[FloatArray, FloatArray]:
        """Copies of what ``hazards`` takes; watches still open are no part of it."""
        self.settle()
        return self._hits.copy(), self._reached.T.copy()

    def restore(self, hits: FloatArray, reached: FloatArray, clock: int) -> None:
        """Goes on where an earlier estimator ended; ``resumed`` gives it the watches that were open."""
        self.settle()
        assert not self._open.any(), "restore an estimator that watches nothing"
        self._hits[:], self._reached[:] = hits, reached.T
        self.clock = clock
        self.refresh()

    def refresh(self) -> None:
        """Computes hazards and index from what was counted so far."""
        self.settle()
        self.version += 1
        self._compute()

    def _compute(self) -> None:
        active = np.flatnonzero(self._reached.any(axis=0) | self._hits.any(axis=1))
        levels = np.arange(NUM_CLASSES) % NUM_VISIT_LEVELS
        computed = hazards(self._hits[active], self._reached[:, active].T.copy(), levels[active])
        rows = len(active) + levels
        rows[active] = np.arange(len(active))
        self._hazards = computed[rows]
        index: list[list[float]] = retention_index(computed).tolist()
        self._index = [index[row] for row in rows.tolist()]
        survival = np.cumprod((1.0 - computed)[:, ::-1], axis=1)[:, ::-1]
        probabilities: list[list[float]] = (1.0 - survival).tolist()
        self._probabilities = [probabilities[row] for row in rows.tolist()]
        self._computed_version = self.version

    def _settle_version(self) -> None:
        """The index depends on nothing that happened since it was last due."""
        if self._computed_version != self.version:
            self.settle()

    def index(self, reuse_class: int, age: int) -> float:
        """Reuses per admitted request that keeping a node of this class and age can earn."""
        self._settle_version()
        return self._index[reuse_class][age_bucket(age)]

    def bucket_index(self, reuse_class: int) -> list[float]:
        """``index`` by age bucket."""
        self._settle_version()
        return self._index[reuse_class]

    def probability(self, reuse_class: int, age: int) -> float:
        """P(a node of this class and age is visited again before its watch is given up)."""
        self._settle_version()
        return self._probabilities[reuse_class][age_bucket(age)]

    def probability_within(self, reuse_class: int, age: int, horizon: int) -> float:
        """P(a node of this class and age is visited in the next ``horizon`` admitted requests)."""
        self._settle_version()
        survival = 1.0
        hazard = self._hazards[reuse_class]
        age = max(age, 1)
        end = age + horizon
        for bucket in range(age_bucket(age), NUM_AGE_BUCKETS):
            first = int(BUCKET_STARTS[bucket])
            if first >= end:
                break
            width = float(BUCKET_WIDTHS[bucket])
            covered = min((min(end, first + width) - max(age, first)) / width, 1.0)
            survival *= (1.0 - hazard[bucket]) ** max(covered, 0.0)
        return float(1.0 - survival)

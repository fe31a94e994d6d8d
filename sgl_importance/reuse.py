"""Will this node be asked for again? Beta-Bernoulli posteriors with an age hazard per class.

The hit-age and end-age histograms follow LHD (Beckmann, Chen, Cidon, NSDI 2018): the probability that a
node of age a is still to be hit is the share of hits among all events at ages >= a. The Beta prior keeps
it sane without data, and makes an untrained server rank like LRU within a class.
"""

from __future__ import annotations

from enum import IntEnum

PRIOR_STRENGTH = 8.0
PRIOR_AGE_FACTOR = 0.8  # per doubling of the age: without evidence, older means less likely
FORGET_AFTER_EVENTS = 4096.0  # then old events count half, so that the estimate follows the traffic
NUM_AGE_BUCKETS = 32  # doublings of the age, in admitted requests
MAX_VISITS = 2  # visits beyond this make no new class


class BlockType(IntEnum):
    PROMPT = 0
    GENERATED = 1


_PRIOR_BY_VISITS = (0.3, 0.6, 0.8)
NUM_CLASSES = len(BlockType) * (MAX_VISITS + 1)


def reuse_class(block_type: BlockType, accesses: int) -> int:
    """The class whose history predicts a node: what it holds, and how often it was asked for before."""
    return block_type * (MAX_VISITS + 1) + min(accesses, MAX_VISITS)


def age_bucket(age: int) -> int:
    """Doublings of the age, in admitted requests: 0, 1, 2-3, 4-7, ..."""
    return min(max(age, 0).bit_length(), NUM_AGE_BUCKETS - 1)


class _ClassHistory:
    """Hits and ends of one class by age, and the probabilities that follow from them."""

    __slots__ = ("_dirty", "_ends", "_events", "_hits", "_prior", "_probabilities")

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._hits = [0.0] * NUM_AGE_BUCKETS
        self._ends = [0.0] * NUM_AGE_BUCKETS
        self._events = 0.0
        self._dirty = True
        self._probabilities = [0.0] * NUM_AGE_BUCKETS

    def record(self, age: int, *, hit: bool) -> None:
        (self._hits if hit else self._ends)[age_bucket(age)] += 1.0
        self._events += 1.0
        if self._events > FORGET_AFTER_EVENTS:
            self._hits = [count / 2 for count in self._hits]
            self._ends = [count / 2 for count in self._ends]
            self._events /= 2
        self._dirty = True

    def probabilities(self) -> list[float]:
        """P(reuse) by age bucket, never increasing with age: the victim order relies on that."""
        if self._dirty:
            hits = ends = 0.0
            probabilities = self._probabilities
            for bucket in reversed(range(NUM_AGE_BUCKETS)):
                hits += self._hits[bucket]
                ends += self._ends[bucket]
                prior = self._prior * PRIOR_AGE_FACTOR**bucket
                probabilities[bucket] = (hits + PRIOR_STRENGTH * prior) / (hits + ends + PRIOR_STRENGTH)
            for bucket in range(1, NUM_AGE_BUCKETS):
                self._probabilities[bucket] = min(
                    self._probabilities[bucket], self._probabilities[bucket - 1]
                )
            self._dirty = False
        return self._probabilities


class ReuseEstimator:
    """P(a node is asked for again), learnt online from hits and from ghosts that nobody asked for."""

    def __init__(self) -> None:
        self._classes = [_ClassHistory(prior) for _ in BlockType for prior in _PRIOR_BY_VISITS]
        assert len(self._classes) == NUM_CLASSES

    def hit(self, reuse_class: int, age: int) -> None:
        """A node of this class was asked for, ``age`` admitted requests after the last time."""
        self._classes[reuse_class].record(age, hit=True)

    def end(self, reuse_class: int, age: int) -> None:
        """A node of this class was given up: nobody asked for it up to this age."""
        self._classes[reuse_class].record(age, hit=False)

    def probability(self, reuse_class: int, age: int) -> float:
        return self._classes[reuse_class].probabilities()[age_bucket(age)]

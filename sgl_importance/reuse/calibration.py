"""Calibration of the reuse predictions: sampled visits, compared with what followed.

A forecaster is calibrated if, of the visits given probability p, a share p is followed by another within the
horizon (Dawid, "The well-calibrated Bayesian", JASA 1982). The sums per bucket are those of a reliability
diagram: mean prediction against observed frequency.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

HORIZON = 256
"""Admitted requests within which a visit has to be followed by another."""
SAMPLED_EVERY = 7  # coprime to powers of two, which paths and page counts often are
MAX_PENDING = 4096
NUM_BUCKETS = 10
BUCKETS = tuple(f"{(index + 1) / NUM_BUCKETS:.1f}" for index in range(NUM_BUCKETS))
"""Upper bound of each bucket of predicted probability."""


@dataclass(slots=True, eq=False)
class Prediction:
    """The prediction made at one visit of one node; it goes with the node into its ghost.

    Attributes:
        deadline: clock at which it is judged, in admitted requests.
        came_true: whether the node was visited by then.
    """

    probability: float
    deadline: int
    came_true: bool = False


@dataclass
class Calibration:
    """Predictions that wait for their outcome, and the outcomes by bucket of predicted probability.

    Attributes:
        judged: predictions whose horizon is over.
        predicted: sum of their probabilities.
        observed: how many came true.
    """

    judged: list[int] = field(default_factory=lambda: [0] * NUM_BUCKETS)
    predicted: list[float] = field(default_factory=lambda: [0.0] * NUM_BUCKETS)
    observed: list[int] = field(default_factory=lambda: [0] * NUM_BUCKETS)
    _pending: deque[Prediction] = field(default_factory=deque)
    _visits: int = 0

    def wants(self) -> bool:
        """Whether this visit is sampled; every visit has to ask."""
        self._visits += 1
        return self._visits % SAMPLED_EVERY == 0 and len(self._pending) < MAX_PENDING

    def predict(self, probability: float, clock: int) -> Prediction:
        """Takes in P(another visit within ``HORIZON``) as it was predicted at a visit."""
        assert 0 <= probability <= 1, probability
        prediction = Prediction(probability, clock + HORIZON)
        self._pending.append(prediction)
        return prediction

    def advance(self, clock: int) -> None:
        """Judges predictions that are due; a visit at ``clock`` is too late for them."""
        while self._pending and self._pending[0].deadline < clock:
            prediction = self._pending.popleft()
            bucket = min(int(prediction.probability * NUM_BUCKETS), NUM_BUCKETS - 1)
            self.judged[bucket] += 1
            self.predicted[bucket] += prediction.probability
            self.observed[bucket] += prediction.came_true

    def clear(self) -> None:
        """Every open prediction ends without an outcome: a flush says nothing about reuse."""
        self._pending.clear()

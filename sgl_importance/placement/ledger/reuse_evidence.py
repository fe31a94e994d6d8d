"""The evidence of a reuse estimator, in a form that outlives it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from sgl_importance.reuse.estimator import DECAY, REFRESH_INTERVAL, ReuseEstimator
from sgl_importance.reuse.life_table import NUM_AGE_BUCKETS, NUM_EXACT_BUCKETS, FloatArray
from sgl_importance.reuse.reuse_class import CLASSES_OF_END, NUM_CLASSES


@dataclass(frozen=True, slots=True)
class ReuseEvidence:
    """Counts of a reuse estimator. They are linear, so those of several estimators add up.

    Attributes:
        hits: as in ``hazards``, float64 [NUM_CLASSES, NUM_AGE_BUCKETS].
        reached: as in ``hazards``, float64 [NUM_CLASSES, NUM_AGE_BUCKETS].
        refreshes: decays that were applied while it was counted.
    """

    hits: FloatArray
    reached: FloatArray
    refreshes: int

    @classmethod
    def of(cls, estimator: ReuseEstimator) -> ReuseEvidence:
        """The estimator's counts so far."""
        return cls(*estimator.counts(), estimator.clock // REFRESH_INTERVAL)

    @classmethod
    def nothing(cls) -> ReuseEvidence:
        """No visit counted yet."""
        none = np.zeros((NUM_CLASSES, NUM_AGE_BUCKETS))
        return cls(none, none, 0)

    def since(self, earlier: ReuseEvidence) -> ReuseEvidence:
        """Counts that the same estimator added after ``earlier``."""
        refreshes = self.refreshes - earlier.refreshes
        assert refreshes >= 0
        kept = DECAY**refreshes
        # Rounding may leave a count a hair below 0.
        return ReuseEvidence(
            np.maximum(self.hits - kept * earlier.hits, 0.0),
            np.maximum(self.reached - kept * earlier.reached, 0.0),
            refreshes,
        )

    def followed_by(self, later: ReuseEvidence) -> ReuseEvidence:
        """These counts and later ones of the same estimator."""
        kept = DECAY**later.refreshes
        return ReuseEvidence(
            kept * self.hits + later.hits,
            kept * self.reached + later.reached,
            self.refreshes + later.refreshes,
        )

    def to_bytes(self) -> bytes:
        """A few KB; zlib adds a checksum."""
        evidence = np.flatnonzero(self.hits.any(axis=1) | self.reached.any(axis=1))
        last = int(evidence[-1]) if len(evidence) else 0
        written = (last // CLASSES_OF_END + 1) * CLASSES_OF_END
        header = np.array([self.refreshes, written, NUM_AGE_BUCKETS], dtype="<i8").tobytes()
        counts = np.stack([self.hits[:written], self.reached[:written]]).astype("<f8").tobytes()
        return zlib.compress(header + counts, level=1)

    @classmethod
    def from_bytes(cls, data: bytes) -> ReuseEvidence | None:
        """Counts that ``to_bytes`` wrote; None where they are damaged or of other classes."""
        try:
            raw = zlib.decompress(data)
            refreshes, written, buckets = np.frombuffer(raw, dtype="<i8", count=3).tolist()
            if written not in range(CLASSES_OF_END, NUM_CLASSES + 1, CLASSES_OF_END):
                return None
            if buckets not in (NUM_AGE_BUCKETS, NUM_EXACT_BUCKETS):  # the latter by schema 2
                return None
            hits, reached = np.zeros((2, NUM_CLASSES, NUM_AGE_BUCKETS))
            kept = np.frombuffer(raw, dtype="<f8", offset=24).reshape(2, written, buckets)
            hits[:written, :buckets], reached[:written, :buckets] = kept
        except (zlib.error, ValueError):
            return None
        counts = np.concatenate((hits, reached))
        return cls(hits, reached, refreshes) if np.isfinite(counts).all() and (counts >= 0).all() else None

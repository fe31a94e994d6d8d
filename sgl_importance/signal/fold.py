"""Folding: one query's page scores, accumulated on the nodes of its path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_importance.reuse.reuse_class import Transition
from sgl_importance.signal.node_importance import FloatArray, NodeImportance


@dataclass(frozen=True, slots=True)
class Observation:
    """One query's page scores over its context, normalised.

    Attributes:
        body: body mass per page of the sequence, float64 [num_pages], sums to 1.
        peak: largest probability per page, float64 [num_pages].
        uniform: body mass per page under uniform attention, 1 / (pages with any body).
    """

    body: FloatArray
    peak: FloatArray
    uniform: float

    @classmethod
    def from_sums(cls, body: npt.NDArray[np.floating], peak: npt.NDArray[np.floating]) -> Observation | None:
        """Normalises a row of accumulated body mass; None where the context has no body to speak of, or where
        numbers are not finite: a NaN of one request would stay on the nodes that it shares with others."""
        total = float(body.sum(dtype=np.float64))
        if not (0 < total < np.inf and np.isfinite(peak).all()):
            return None
        normalised = np.asarray(body, dtype=np.float64) / total
        return cls(
            normalised, np.asarray(peak, dtype=np.float64), 1.0 / max(1, int(np.count_nonzero(normalised)))
        )


@dataclass(slots=True)
class QueryFolds:
    """One query: the part of its weight that is still to be folded, and its relation to the cache.

    A query weighs 1 however long it decodes. Its folds (prefill end, each retraction) take half of what is
    left, and the finish takes the rest, so that no order of events counts a query twice.
    """

    serial: int
    transition: Transition = Transition.COLD
    remaining: float = 1.0

    @property
    def is_first(self) -> bool:
        """Whether nothing of the query was folded yet."""
        return self.remaining == 1.0

    def take(self, *, last: bool) -> float:
        """The weight of the next fold."""
        weight = self.remaining if last else self.remaining / 2
        self.remaining -= weight
        return weight


def fold(
    path: Sequence[NodeImportance],
    observation: Observation,
    *,
    query: int,
    weight: float,
    first: bool,
    half_life_queries: float,
) -> float:
    """Adds one observation to the nodes of a path, root side first.

    Args:
        path: nodes from below the root down.
        observation: the query's page scores.
        query: serial number of the query.
        weight: share of the query that the observation stands for, in (0, 1].
        first: whether it is the first observation of the query.
        half_life_queries: visits after which a query's weight has halved.

    Returns:
        The body mass of the tail, i.e. of pages that no node of the path holds. Nodes and tail sum to 1.
    """
    assert 0 < weight <= 1, weight
    decay = 0.5 ** (1 / half_life_queries)
    start = 0
    for node in path:
        stop = start + node.num_pages
        body = observation.body[start:stop]
        peak = observation.peak[start:stop]
        if len(body) < node.num_pages:
            # The last emitting step did not see the youngest pages yet: to it they had no mass.
            missing = node.num_pages - len(body)
            body, peak = np.pad(body, (0, missing)), np.pad(peak, (0, missing))
        node.observe(query, body, peak, uniform=observation.uniform, weight=weight, first=first, decay=decay)
        start = stop
    return float(observation.body[start:].sum())

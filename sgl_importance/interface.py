"""The standard signal between attention and memory: page scores of KV, as every producer gives them.

A *page* is ``page_size`` consecutive tokens of a sequence, the server's own page size. For one query token,
*mass* is the attention probability on the page (mean over query heads and sampled layers), *peak* the largest
probability of the page in any head of any sampled layer, and *body mass* the mass of the tokens between the
attention sinks and the query's neighbourhood, renormalised to 1. Policies consume body mass and peak.
``sgl_importance_lab.conformance.page_scores`` defines all three to the last rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

__all__ = ["SCHEMA_VERSION", "BlockImportance", "Importance", "ImportanceSource", "PageVector", "SignalKind"]

PageVector = npt.NDArray[np.float32]

SCHEMA_VERSION = 1
"""Of the specification (docs/spec.md) that this file follows, and of the JSON form."""

_SUM_TOLERANCE = 1e-3  # Of a mean of sums of probabilities in float32, half-precision producers included.


class SignalKind(StrEnum):
    """Relation of scores to the definition."""

    EXACT = "exact"
    """The definition, up to rounding."""
    PROXY = "proxy"
    """Another quantity in its place (an indexer's scores, a bound): only the order of pages has a meaning."""


@dataclass(frozen=True, slots=True)
class BlockImportance:
    """Page scores of some query tokens over the first pages of a sequence.

    Arrays are float32 [num_pages], page 0 first; the last page may hold fewer than ``page_size`` tokens.

    Attributes:
        mass: mean over query tokens of the mass per page; sums to 1.
        body_mass: mean over query tokens of the body mass per page; sums to at most 1, since a query token
            whose context is all sink and neighbourhood adds nothing.
        peak: maximum over query tokens of the peak per page, in [0, 1].
        page_size: tokens per page.
        query_tokens: number of query tokens behind these numbers, at least 1.
        kind: whether the numbers are the definition's or stand in for them.
    """

    mass: PageVector
    body_mass: PageVector
    peak: PageVector
    page_size: int
    query_tokens: int
    kind: SignalKind = SignalKind.EXACT

    @property
    def num_pages(self) -> int:
        return int(self.mass.shape[0])

    def check_integrity(self) -> None:
        """Asserts shapes, ranges and, of an exact signal, sums."""
        vectors = {"mass": self.mass, "body_mass": self.body_mass, "peak": self.peak}
        for name, vector in vectors.items():
            assert vector.shape == (self.num_pages,), f"{name}: shape {vector.shape}, not ({self.num_pages},)"
            assert vector.dtype == np.float32, f"{name}: {vector.dtype}, not float32"
            assert np.isfinite(vector).all(), f"{name}: not finite"
            assert (vector >= 0).all(), f"{name}: negative"
        assert self.num_pages > 0, "a query token sees at least its own page"
        assert self.page_size > 0, f"page_size {self.page_size}"
        assert self.query_tokens > 0, f"query_tokens {self.query_tokens}"
        if self.kind is SignalKind.EXACT:
            mass, body = float(self.mass.sum(dtype=np.float64)), float(self.body_mass.sum(dtype=np.float64))
            assert abs(mass - 1) <= _SUM_TOLERANCE, f"mass sums to {mass}"
            assert body <= 1 + _SUM_TOLERANCE, f"body mass sums to {body}"
            assert float(self.peak.max()) <= 1 + _SUM_TOLERANCE, f"peak {self.peak.max()}"


@dataclass(frozen=True, slots=True)
class Importance:
    """Importance of one page that is or was in the cache.

    Attributes:
        body_mass: mean body mass that queries gave the page, in [0, 1].
        peak: mean over queries of the page's peak, in [0, 1].
        cross_body_mass: as ``body_mass``, of queries other than the one that created the page: only this may
            move a ranking.
        cross_peak: as ``peak``, of the same queries.
        queries: distinct queries other than the creator that looked at the page's node.
        weight: decayed number of queries behind the means; 0 before the first query.
        kind: whether the numbers are the definition's or stand in for them.
    """

    body_mass: float
    peak: float
    cross_body_mass: float
    cross_peak: float
    queries: int
    weight: float
    kind: SignalKind = SignalKind.EXACT


@runtime_checkable
class ImportanceSource(Protocol):
    """A source of the importance of pages."""

    def get_importance(self, key: bytes) -> Importance | None:
        """Importance of one page.

        Does not modify the source, takes no lock and no device transfer: safe on the scheduler thread.

        Args:
            key: chained digest of the page, as made by ``sgl_importance.nodes.digests.chain_digests``: it
                stands for the page's tokens and all tokens before them.

        Returns:
            None where the page is unknown, which says nothing about its worth.
        """
        ...

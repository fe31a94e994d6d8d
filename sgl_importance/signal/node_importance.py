"""Accumulated attention of one node: body mass and peak per page, self and cross kept apart."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from sgl_importance.interface import Importance

FloatArray = npt.NDArray[np.float64]


class Origin(IntEnum):
    """Origin of attention on a page: the query that created the page (self), or a later one (cross)."""

    SELF = 0
    CROSS = 1


class _Row(IntEnum):
    MASS = 0
    PEAK = 1
    UNIFORM = 2
    WEIGHT = 3


class NodeImportance:
    """Exponentially weighted body mass and peak of one node's pages.

    The half-life counts queries that visited the node: a node without visits does not decay, because
    ageing is the hazard's job. Sums and weights decay together, so a mean needs no bias correction and a
    split, which slices the arrays, preserves every sum.

    Attributes:
        creator: query that brought the pages into the tree; None where it is not known (storage).
        inherited_pages: first pages that ghosts knew: the creator of the others did not bring them, and is
            one more query that looked at them.
        queries: distinct queries other than the creator that looked at the node.
    """

    __slots__ = ("_inherited_queries", "_pages", "creator", "inherited_pages", "queries")

    def __init__(self, num_pages: int, creator: int | None = None) -> None:
        assert num_pages > 0, "a node has at least one page"
        self._pages: FloatArray = np.zeros((len(Origin), len(_Row), num_pages))
        self.creator = creator
        self.inherited_pages = 0
        self.queries = 0
        self._inherited_queries = 0

    @property
    def num_pages(self) -> int:
        return int(self._pages.shape[2])

    def observe(
        self,
        query: int,
        body: FloatArray,
        peak: FloatArray,
        *,
        uniform: float,
        weight: float,
        first: bool,
        decay: float,
    ) -> None:
        """Adds the page scores of one query.

        Args:
            query: serial number of the query.
            body: body mass per page, float [num_pages]; the whole fold sums to 1 over nodes and tail.
            peak: largest probability per page, float [num_pages].
            uniform: body mass that each page would have if attention were uniform in this context.
            weight: share of the query that this fold stands for, in (0, 1].
            first: whether this is the query's first fold: only that one counts the query and decays the sums
                of earlier queries, so that the parts of one query do not age each other.
            decay: factor on everything known before the query, 0.5 ** (1 / half_life_queries).
        """
        assert body.shape == peak.shape == (self.num_pages,), (body.shape, peak.shape, self.num_pages)
        of_others = self.inherited_pages if query == self.creator else self.num_pages
        if first:
            self._pages *= decay
            if of_others:
                self.queries += 1
                self._inherited_queries += query == self.creator
        for origin, part in ((Origin.CROSS, slice(of_others)), (Origin.SELF, slice(of_others, None))):
            pages = self._pages[origin, :, part]
            pages[_Row.MASS] += weight * body[part]
            pages[_Row.PEAK] += weight * peak[part]
            pages[_Row.UNIFORM] += weight * uniform
            pages[_Row.WEIGHT] += weight

    def split(self, prefix_pages: int) -> NodeImportance:
        """Cuts the first ``prefix_pages`` pages off into the returned node; this one keeps the rest."""
        assert 0 < prefix_pages < self.num_pages, (prefix_pages, self.num_pages)
        prefix = NodeImportance(prefix_pages, self.creator)
        prefix._pages = self._pages[:, :, :prefix_pages].copy()
        prefix.queries, prefix._inherited_queries = self.queries, self._inherited_queries
        prefix.inherited_pages = min(self.inherited_pages, prefix_pages)
        self._pages = self._pages[:, :, prefix_pages:].copy()
        self.inherited_pages -= prefix.inherited_pages
        if not self.inherited_pages:
            self.queries -= self._inherited_queries
            self._inherited_queries = 0
        return prefix

    def page_vectors(self) -> FloatArray:
        """All sums and weights of each page, float64 [num_pages, 8]: the part that a ghost keeps."""
        vectors: FloatArray = self._pages.reshape(-1, self.num_pages).T.copy()
        return vectors

    def page_importance(self, page: int) -> Importance:
        """Importance of one page, in the form that consumers share."""
        return importance_of(self._pages[:, :, page].reshape(-1), self.queries)

    def restore_pages(self, start: int, vectors: FloatArray, queries: int) -> None:
        """Restores the vectors of ghosts to pages from ``start`` on; the creator of such pages is unknown."""
        assert start <= self.inherited_pages, "ghosts come back in order"
        stop = start + len(vectors)
        self.inherited_pages = max(self.inherited_pages, stop)
        self._pages[:, :, start:stop] = vectors.T.reshape(len(Origin), len(_Row), -1)
        self.queries = self._inherited_queries = max(self.queries, queries)

    def sums(self, origin: Origin) -> FloatArray:
        """Weighted body-mass sum per page, float64 [num_pages]: the quantity that a split preserves."""
        return self._total(_Row.MASS, origin)

    def weight(self, origin: Origin | None = None) -> FloatArray:
        """Decayed number of queries behind each page's mean, float64 [num_pages]."""
        return self._total(_Row.WEIGHT, origin)

    def body_mass(self, origin: Origin | None = None) -> FloatArray:
        """Mean body mass per page, float64 [num_pages]; 0 where nothing was observed."""
        return _ratio(self._total(_Row.MASS, origin), self.weight(origin))

    def peak(self, origin: Origin | None = None) -> FloatArray:
        """Mean of the queries' peaks per page, float64 [num_pages]; 0 where nothing was observed."""
        return _ratio(self._total(_Row.PEAK, origin), self.weight(origin))

    def lift(self, origin: Origin | None = None) -> float:
        """The node's body mass over what uniform attention would give it; 1.0 where nothing was observed.

        Grows with context length for a page of content: never compare it between contexts.
        """
        uniform = float(self._total(_Row.UNIFORM, origin).sum())
        return float(self._total(_Row.MASS, origin).sum()) / uniform if uniform > 0 else 1.0

    def _total(self, row: _Row, origin: Origin | None) -> FloatArray:
        total: FloatArray = self._pages[:, row].sum(axis=0) if origin is None else self._pages[origin, row]
        return total


def importance_of(vector: FloatArray, queries: int) -> Importance:
    """One row of ``NodeImportance.page_vectors`` in the form that consumers share.

    Args:
        vector: float64 [8].
        queries: distinct queries other than the creator that looked at the page's node.
    """
    self_mass, self_peak, _, self_weight, cross_mass, cross_peak, _, cross_weight = vector.tolist()
    weight = self_weight + cross_weight
    return Importance(
        body_mass=(self_mass + cross_mass) / weight if weight > 0 else 0.0,
        peak=(self_peak + cross_peak) / weight if weight > 0 else 0.0,
        cross_body_mass=cross_mass / cross_weight if cross_weight > 0 else 0.0,
        cross_peak=cross_peak / cross_weight if cross_weight > 0 else 0.0,
        queries=queries,
        weight=weight,
    )


def _ratio(sums: FloatArray, weights: FloatArray) -> FloatArray:
    means: FloatArray = np.divide(sums, weights, out=np.zeros_like(sums), where=weights > 0)
    return means

"""The accumulator of ``docs/spec.md`` page by page, without a tree: the model that golden cases come from.

Written for reading: no node, nothing shared between pages, nothing fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sgl_importance.interface import Importance
from sgl_importance.nodes.digests import chain_digests, root_digest
from sgl_importance_lab.conformance.cases import ConsumerCase, Observed, ServedQuery


@dataclass(slots=True)
class _Sums:
    mass: float = 0.0
    peak: float = 0.0
    weight: float = 0.0


@dataclass(slots=True)
class _Page:
    creator: int | None
    own: _Sums = field(default_factory=_Sums)
    cross: _Sums = field(default_factory=_Sums)
    queries: int = 0


class PageMemory:
    """Every page that was ever cached, by key.

    Args:
        case: whose page size and half-life hold; nothing is ever forgotten.
    """

    def __init__(self, case: ConsumerCase) -> None:
        self._page_size = case.page_size
        self._decay = 0.5 ** (1 / case.half_life_queries)
        self._pages: dict[bytes, _Page] = {}
        self._queries = 0

    def serve(self, query: ServedQuery) -> None:
        self._queries += 1
        weight_left = 1.0
        root = root_digest(query.extra_key, query.cache_salt)
        parts = ((query.prompt, query.prefill), (query.prompt + query.generated, query.decode))
        for is_finish, (tokens, observed) in enumerate(parts):
            keys = chain_digests(root, tokens, self._page_size)
            for key in keys:
                self._pages.setdefault(key, _Page(self._queries))
            if observed is not None and observed.body_mass.any():
                weight = weight_left if is_finish else weight_left / 2
                self._fold([self._pages[key] for key in keys], observed, weight, is_first=weight_left == 1.0)
                weight_left -= weight

    def _fold(self, pages: Sequence[_Page], observed: Observed, weight: float, *, is_first: bool) -> None:
        total = float(observed.body_mass.sum(dtype="float64"))
        for number, page in enumerate(pages):
            is_cross = page.creator != self._queries
            if is_first:
                for sums in (page.own, page.cross):
                    sums.mass *= self._decay
                    sums.peak *= self._decay
                    sums.weight *= self._decay
                page.queries += is_cross
            seen = number < len(observed.body_mass)
            sums = page.cross if is_cross else page.own
            sums.mass += weight * float(observed.body_mass[number]) / total if seen else 0.0
            sums.peak += weight * float(observed.peak[number]) if seen else 0.0
            sums.weight += weight

    def evict_all(self) -> None:
        for page in self._pages.values():
            page.creator = None

    def get_importance(self, key: bytes) -> Importance | None:
        page = self._pages.get(key)
        if page is None:
            return None
        own, cross = page.own, page.cross
        weight = own.weight + cross.weight
        return Importance(
            body_mass=(own.mass + cross.mass) / weight if weight else 0.0,
            peak=(own.peak + cross.peak) / weight if weight else 0.0,
            cross_body_mass=cross.mass / cross.weight if cross.weight else 0.0,
            cross_peak=cross.peak / cross.weight if cross.weight else 0.0,
            queries=page.queries,
            weight=weight,
        )


def model() -> type[PageMemory]:
    """For ``sgl-importance conformance consumer sgl_importance_lab.conformance.memory:model``."""
    return PageMemory

"""LRU and importance side by side, at the same capacity, on the same requests; and LRU with more memory."""

from __future__ import annotations

from sgl_importance.observe.shadow.comparison import Comparison
from sgl_importance.observe.shadow.shadow_cache import ShadowCache
from sgl_importance.observe.shadow.shadow_ranking import (
    ImportanceRanking,
    LruShadowRanking,
    ShadowRanking,
)
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.reuse.answer_end import AnswerEnd

SERVER_CHUNK_TOKENS = 8192
"""sglang's ``--chunked-prefill-size`` where nobody says it; its own default is 2,048 to 16,384 by device."""


LARGER = 2
"""Pools in one: what more memory would be worth beside another policy."""


class ShadowPair:
    """Shadow caches of LRU and importance, and of LRU in ``LARGER`` times the pool.

    Attributes:
        comparison: of importance with LRU.
        larger: of the larger pool with LRU.

    Args:
        capacity: pages of the device tier.
        page_size: tokens per page.
        cost: of the server's policy.
        ghost_pages: pages that importance remembers after their eviction.
        chunk_tokens: of a prompt that the server prefills at once; None for all of it.
    """

    def __init__(
        self,
        capacity: int,
        page_size: int,
        cost: CostModel,
        ghost_pages: int,
        *,
        chunk_tokens: int | None = SERVER_CHUNK_TOKENS,
    ) -> None:
        self.capacity = capacity
        self.page_size = page_size
        self.comparison = Comparison()
        self.larger = Comparison()
        self._cost = cost
        self._ghost_pages = ghost_pages
        self._chunk_tokens = chunk_tokens
        self.reset()

    def reset(self) -> None:
        """Empties the caches, as a flush does; counts go on, the estimate of reuse is forgotten."""
        ranking = ImportanceRanking(self._cost, self.page_size, self._ghost_pages)
        self.lru = self._cache(LruShadowRanking())
        self.importance = self._cache(ranking)
        self._lru_in_more = self._cache(LruShadowRanking(), LARGER)

    def _cache(self, ranking: ShadowRanking, pools: int = 1) -> ShadowCache:
        return ShadowCache(
            pools * self.capacity,
            self.page_size,
            ranking,
            spare_pages=int(self.page_size > 1),
            chunk_tokens=self._chunk_tokens,
        )

    def admit(self, request: str, pages: list[bytes], tokens: int) -> tuple[int, int] | None:
        """A request starts.

        Returns:
            Prompt tokens that LRU and importance find; None where the pool cannot hold the prompt: a server
            refuses it, and it is not compared.
        """
        lru = self.lru.admit(request, pages, tokens)
        importance = self.importance.admit(request, pages, tokens)
        if lru is None or importance is None:
            return None
        in_more = self._lru_in_more.admit(request, pages, tokens)
        assert in_more is not None, "what a pool holds a larger one does"
        self.comparison.add(tokens, lru, importance)
        self.larger.add(tokens, lru, in_more)
        return lru, importance

    def finish(
        self, request: str, pages: list[bytes], tokens: int, answer_end: AnswerEnd = AnswerEnd.UNKNOWN
    ) -> None:
        """A request ended with these tokens of prompt and answer."""
        self.lru.finish(request, pages, tokens, answer_end)
        self.importance.finish(request, pages, tokens, answer_end)
        self._lru_in_more.finish(request, pages, tokens, answer_end)

    def gone(self, request: str) -> None:
        """A request will not be finished."""
        self.lru.gone(request)
        self.importance.gone(request)
        self._lru_in_more.gone(request)

    def told(self, request: str, answer_end: AnswerEnd) -> None:
        """It became known how the answer of a finished request had ended. Recency does not ask."""
        self.importance.told(request, answer_end)

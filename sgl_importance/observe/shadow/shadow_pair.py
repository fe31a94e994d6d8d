"""LRU and importance side by side on the same requests, at the same capacity; and what else would save."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sgl_importance.nodes.named_sessions import SessionName
from sgl_importance.observe.shadow.comparison import Comparison
from sgl_importance.observe.shadow.hindsight import Hindsight
from sgl_importance.observe.shadow.shadow_cache import ShadowCache
from sgl_importance.observe.shadow.shadow_ranking import (
    ImportanceRanking,
    LruShadowRanking,
    ShadowRanking,
)
from sgl_importance.observe.shadow.tiered_shadow import HostWrites, TieredShadowCache
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.reuse.answer_end import AnswerEnd

SERVER_CHUNK_TOKENS = 8192
"""sglang's ``--chunked-prefill-size`` where nobody says it; its own default is 2,048 to 16,384 by device."""

POOLS = (2, 4, 8)
"""Pools in one: what more memory would be worth beside another policy, and where that ends."""


class ShadowPair:
    """Shadow caches of LRU and importance, and of LRU in more memory.

    Where the server has a host tier, each has one of the same size.

    Attributes:
        comparison: of importance with LRU.
        larger: of LRU in so many times the device's pool with LRU, by the number of ``POOLS``.
        write_back: of LRU under write-back with LRU; None without a host tier, and where the server itself
            writes back.
        sessions_end: of importance with LRU, if each session said when it is over; some requests behind.

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
        self.host_pages = 0
        self.comparison = Comparison()
        self.larger = {pools: Comparison() for pools in POOLS}
        self.write_back: Comparison | None = None
        self.sessions_end = Comparison()
        self._writes: HostWrites | None = None
        self._cost = cost
        self._ghost_pages = ghost_pages
        self._chunk_tokens = chunk_tokens
        self.reset()

    def add_host(self, pages: int, writes: HostWrites = HostWrites.WRITE_THROUGH) -> None:
        """The server has a host tier of this many pages, too. Ahead of the first request."""
        assert not self.comparison.requests
        self.host_pages, self._writes = pages, writes
        self.write_back = None if writes is HostWrites.WRITE_BACK else Comparison()
        self.reset()

    def reset(self) -> None:
        """Empties the caches, as a flush does; counts go on, the estimate of reuse is forgotten."""
        self.importance = self._of_importance()
        self._hindsight = Hindsight(self._of_importance(), self.sessions_end)
        self._lru = {
            pools: self._cache(LruShadowRanking(), pools * self.capacity, self._writes)
            for pools in (1, *POOLS)
        }
        self.lru = self._lru[1]
        self._back = None
        if self.write_back is not None:
            self._back = self._cache(LruShadowRanking(), self.capacity, HostWrites.WRITE_BACK)

    def _of_importance(self) -> ShadowCache:
        ranking = ImportanceRanking(self._cost, self.page_size, self._ghost_pages)
        return self._cache(ranking, self.capacity, self._writes)

    def _cache(self, ranking: ShadowRanking, capacity: int, writes: HostWrites | None) -> ShadowCache:
        spare_pages = int(self.page_size > 1)
        if writes is None:
            return ShadowCache(
                capacity,
                self.page_size,
                ranking,
                spare_pages=spare_pages,
                chunk_tokens=self._chunk_tokens,
            )
        return TieredShadowCache(
            capacity,
            self.host_pages,
            self.page_size,
            ranking,
            writes,
            spare_pages=spare_pages,
            chunk_tokens=self._chunk_tokens,
        )

    def _followers(self) -> Iterator[ShadowCache | Hindsight]:
        yield self.importance
        yield self._hindsight
        yield from self._lru.values()
        if self._back is not None:
            yield self._back

    def admit(
        self, request: str, pages: list[bytes], tokens: int, session: SessionName | None = None
    ) -> tuple[int, int] | None:
        """A request starts, of the session that it names.

        Returns:
            Prompt tokens that LRU and importance find, on any tier; None where the pool cannot hold the
            prompt: a server refuses it, and it is not compared.
        """
        lru = self.lru.admit(request, pages, tokens)
        importance = self.importance.admit(request, pages, tokens, session)
        if lru is None or importance is None:
            return None
        self.comparison.add(tokens, lru, importance)
        others = [(compared, self._lru[pools]) for pools, compared in self.larger.items()]
        if self.write_back is not None and self._back is not None:
            others.append((self.write_back, self._back))
        for compared, cache in others:
            hits = cache.admit(request, pages, tokens)
            assert hits is not None, "what a pool holds one as large or larger does"
            compared.add(tokens, lru, hits)
        self._hindsight.admit(request, pages, tokens, session, lru)
        return lru, importance

    def finish(
        self, request: str, pages: list[bytes], tokens: int, answer_end: AnswerEnd = AnswerEnd.UNKNOWN
    ) -> None:
        """A request ended with these tokens of prompt and answer."""
        for cache in self._followers():
            cache.finish(request, pages, tokens, answer_end)

    def gone(self, request: str) -> None:
        """A request will not be finished."""
        for cache in self._followers():
            cache.gone(request)

    def told(self, request: str, answer_end: AnswerEnd) -> None:
        """It became known how the answer of a finished request had ended. Recency does not ask."""
        self.importance.told(request, answer_end)
        self._hindsight.told(request, answer_end)

    def session_over(self, name: SessionName) -> None:
        """A session said that it is over. Recency does not ask."""
        self.importance.session_over(name)
        self._hindsight.session_over(name)

    def document(self) -> dict[str, Any]:
        """What is compared so far, as ``GET /kv_importance`` has it; see ``docs/operate.md``."""
        compared = self.comparison
        document = {
            "capacity_tokens": self.capacity * self.page_size,
            "requests": compared.requests,
            "prompt_tokens": compared.prompt_tokens,
            "lru_hit_tokens": compared.lru_hit_tokens,
            "importance_hit_tokens": compared.other_hit_tokens,
            "saved_tokens": compared.saved_tokens,
            "lost_tokens": compared.lost_tokens,
            "agreed_tokens": compared.agreed_tokens,
            "batches": list(compared.batches),
            "larger_pools": [
                {"times": pools, "hit_tokens": each.other_hit_tokens, "batches": list(each.batches)}
                for pools, each in self.larger.items()
            ],
        }
        if (back := self.write_back) is not None:
            document["write_back"] = {
                "host_tokens": self.host_pages * self.page_size,
                "write_through_hit_tokens": back.lru_hit_tokens,
                "hit_tokens": back.other_hit_tokens,
                "batches": list(back.batches),
            }
        if (ends := self.sessions_end).requests:
            document["sessions_end"] = {
                "requests": ends.requests,
                "prompt_tokens": ends.prompt_tokens,
                "lru_hit_tokens": ends.lru_hit_tokens,
                "hit_tokens": ends.other_hit_tokens,
                "batches": list(ends.batches),
            }
        return document

"""Replays a recording through the real radix tree and its component, without a server.

Requests run one after the other, as they were admitted; what each query saw is folded as it was recorded.
Tokens are made up from page numbers, which name pages with everything before them, so prefixes are shared
exactly as they were.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sgl_importance.errors import ImportanceError
from sgl_importance.observe.trace.records import Fold
from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.observation_options import SignalOptions
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.policy.marginal_loss import ImportancePolicy
from sgl_importance_lab.offline.request_steps import (
    insert_finished,
    insert_unfinished,
    lock_match,
    matched_slots,
    release,
)
from sgl_importance_lab.offline.standalone_cache import CacheKind, build_cache
from sgl_importance_lab.study.recording import Query, Recording
from sglang_importance.attention.rows import Phase, RowScores, ScoreRows
from sglang_importance.cache.importance_cache import ImportanceRadixCache

SLOT = 1


class RecordedRows:
    """The part of ``ScoreRows`` that the tree reads, filled from recorded folds."""

    def __init__(self) -> None:
        self._scores: dict[Phase, RowScores] = {}

    def put(self, phase: Phase, fold: Fold) -> None:
        self._scores[phase] = RowScores(body=fold.body, peak=fold.peak, query_tokens=1)

    def consume(
        self, slot: int, phase: Phase, owner: str | None = None, *, compute: bool = True
    ) -> RowScores | None:
        return self._scores.pop(phase, None)

    def close(self) -> None:
        self._scores.clear()


@dataclass
class _Request:
    """The part of a request that the cache reads."""

    rid: str
    origin_input_ids: array[int]
    kv: SimpleNamespace
    output_ids: array[int] = field(default_factory=lambda: array("q"))
    last_node: int | None = None
    lock_receipt: object = None
    lock: object = None
    prefix_indices: torch.Tensor | None = None
    prefix_len: int = 0
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    session: None = None
    session_id: str | None = None
    kv_rotation_base: int | None = None
    swa_prefix_lock_released: bool = False
    skip_radix_cache_insert: bool = False
    cached_tokens_device: int = 0
    cached_tokens_host: int = 0
    cached_tokens_storage: int = 0
    filled: int = 0
    is_finished: bool = False

    @property
    def output_ids_through_stop(self) -> array[int]:
        return self.output_ids

    @property
    def full_untruncated_fill_ids(self) -> array[int]:
        return self.origin_input_ids + self.output_ids

    @property
    def extend_end(self) -> int:
        return self.filled

    def get_fill_ids(self) -> array[int]:
        return (self.origin_input_ids + self.output_ids)[: self.filled]

    def finished(self) -> bool:
        return self.is_finished


def sequence_tokens(
    query: Query, order: int, page_size: int, num_pages: int
) -> tuple[array[int], array[int]]:
    """Made-up prompt and output tokens of a query; equal pages have equal tokens, all others differ."""
    total = query.input_tokens + query.output_tokens
    pages = query.pages if len(query.pages) >= len(query.prompt_pages) else query.prompt_pages
    whole = (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)[:total]
    own = (num_pages + order) * page_size + np.arange(page_size)
    missing = total - len(whole)
    # A tail of less than a page, or an answer whose end was not recorded.
    tail = np.resize(own, missing) if missing > 0 else own[:0]
    tokens = np.concatenate((whole, tail)).astype(np.int64)
    return array("q", tokens[: query.input_tokens].tolist()), array(
        "q", tokens[query.input_tokens :].tolist()
    )


class LearningEnded(ImportanceError):
    """A replay of ours went over to LRU, as a server would; its numbers are not the policy's."""


class TreeReplay:
    """One pass over a recording.

    Args:
        recording: what to replay.
        capacity_pages: size of the device tier.
        kind: whose evictions.
        policy: for kind "importance"; the recording server's own cost model ranks where None.
        eviction_config: parameters of a stock policy.
    """

    def __init__(
        self,
        recording: Recording,
        *,
        capacity_pages: int,
        kind: CacheKind = "importance",
        policy: ImportancePolicy | None = None,
        eviction_config: dict[str, int] | None = None,
    ) -> None:
        self._recording = recording
        self._page_size = recording.page_size
        self._longest = max(q.input_tokens + q.output_tokens for q in recording.queries) + self._page_size
        options = ImportanceOptions(
            policy="importance",
            signal=SignalOptions(half_life_queries=float(recording.header.options["half_life_queries"])),
        )
        self._rows = RecordedRows()
        self._cache = build_cache(
            kind,
            tokens=capacity_pages * self._page_size,
            page_size=self._page_size,
            requests=2,
            max_context=self._longest,
            options=options,
            rows=cast(ScoreRows, self._rows),
            policy=policy,
            eviction_config=eviction_config,
        )

    def run(self) -> Iterator[tuple[Query, int]]:
        """Each query with the prompt tokens that it found in the cache.

        Raises:
            LearningEnded: a fault ended learning, and what came behind it was LRU's.
        """
        for order, query in enumerate(self._recording.queries):
            yield query, self._serve(order, query)
        if isinstance(self._cache, ImportanceRadixCache):
            fallback = self._cache.importance.state.faults.fallback
            if fallback is not None:
                raise LearningEnded(f"a fault in {fallback.place} ended learning: {fallback.error}")

    def _serve(self, order: int, query: Query) -> int:
        prompt, output = sequence_tokens(query, order, self._page_size, len(self._recording.digests))
        request = _Request(
            f"{order}", prompt, SimpleNamespace(req_pool_idx=SLOT, holds_kv=True, cache_inserted_len=0)
        )
        # The last token is always computed: its logits are asked for.
        match = self._cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt[:-1], None)))
        found = matched_slots(self._cache, match)
        cached = request.prefix_len = len(found)
        request.last_node = match.last_device_node
        lock_match(self._cache, request)
        request.kv.cache_protected_len = cached
        request.cached_tokens_device = request.filled = cached
        request.prefix_indices = found
        row = self._cache.req_to_token_pool.req_to_token[SLOT]
        row[:cached] = found
        folds = list(query.folds)
        held = self._extend(row, cached, len(prompt))
        request.filled = len(prompt)
        # The first fold came with the end of the prefill; a request of one token has no other.
        if folds and folds[0].first:
            self._rows.put(Phase.PREFILL, folds.pop(0))
        insert_unfinished(self._cache, request, up_to=request.filled, is_chunk=False)
        request.output_ids = output
        # Under overlap scheduling a step runs behind the last token, so that its KV is there too.
        request.filled = len(prompt) + len(output)
        held = self._extend(row, held, request.filled)
        if folds:
            self._rows.put(Phase.DECODE, folds[-1])
        request.is_finished = True
        insert_finished(self._cache, request, up_to=request.filled)
        tail = row[request.kv.cache_protected_len : held]
        if len(tail):
            self._cache.token_to_kv_pool_allocator.free(tail.to(torch.int64).clone())
        release(self._cache, request, inserted=True)
        return cached

    def _extend(self, row: torch.Tensor, held: int, stop: int) -> int:
        """Allocates whole pages up to ``stop`` tokens; how many tokens are allocated now."""
        missing = -(-(stop - held) // self._page_size) * self._page_size
        if missing <= 0:
            return held
        allocator = self._cache.token_to_kv_pool_allocator
        if allocator.available_size() < missing:
            self._cache.evict(EvictParams(num_tokens=missing - allocator.available_size()))
        slots = allocator.alloc(missing)
        assert slots is not None, "the capacity is smaller than one request"
        row[held : held + missing] = slots
        return held + missing


def smallest_capacity(recording: Recording) -> int:
    """Pages that the longest request needs."""
    longest = max(query.input_tokens + query.output_tokens for query in recording.queries)
    return -(-longest // recording.page_size) + 1


def hit_tokens(replay: TreeReplay) -> list[int]:
    """Cached prompt tokens of each request, in order."""
    return [hits for _, hits in replay.run()]


def fidelity(recording: Recording) -> str:
    """Compares a replay with stock's order, at the recording server's capacity, with what the server found.

    They agree to the token where that server ran under ``observe``, one request at a time, on one tier.
    """
    capacity = recording.header.capacity_tokens["device"] // recording.page_size
    replayed = hit_tokens(TreeReplay(recording, capacity_pages=capacity, kind="python-lru"))
    recorded = [query.cached_tokens for query in recording.queries]
    equal = sum(a == b for a, b in zip(replayed, recorded, strict=True))
    return (
        f"{recording.name}: replayed with LRU at the server's {capacity} pages, {equal} of {len(recorded)} "
        f"requests find as many cached tokens as the server reported ({sum(replayed)} and {sum(recorded)})"
    )


def recorded_cost(recording: Recording) -> CostModel:
    """The cost model of the recording server."""
    rates = dict(recording.header.cost)
    return CostModel(bytes_per_token=int(rates.pop("bytes_per_token")), **rates)

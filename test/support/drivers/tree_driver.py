"""Drives the real radix tree the way sglang's scheduler does: admit, prefill in chunks, decode, finish.

The tree, its allocators and our component are real. Stood in for are the request object (only the fields
that the cache reads) and the attention scores, so that a test knows exactly what each fold must contain.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.policy.marginal_loss import ImportancePolicy
from sgl_importance_lab.offline.request_steps import (
    insert_finished,
    insert_unfinished,
    lock_match,
    matched_slots,
    release,
)
from sgl_importance_lab.offline.standalone_cache import CacheKind, build_cache
from sglang_importance.attention.rows import Phase, RowScores, ScoreRows
from sglang_importance.cache.importance_cache import ImportanceRadixCache
from sglang_importance.observe.recorder import Recorder
from sglang_importance.placement.backup_filter import BackupFilter

PAGE = 4


class ScriptedRows:
    """Page scores by slot and phase, put there by the test in place of the attention backend."""

    def __init__(self) -> None:
        self.scores: dict[tuple[int, Phase], RowScores] = {}

    def put(self, slot: int, phase: Phase, body: np.ndarray) -> None:
        vector = body.astype(np.float32)
        self.scores[slot, phase] = RowScores(body=vector, peak=vector, query_tokens=1)

    def consume(
        self, slot: int, phase: Phase, owner: str | None = None, *, compute: bool = True
    ) -> RowScores | None:
        return self.scores.pop((slot, phase), None)

    def discard(self, slot: int) -> None:
        for phase in Phase:
            self.scores.pop((slot, phase), None)

    def close(self) -> None:
        self.scores.clear()


@dataclass
class Request:
    """What the cache reads of a request."""

    rid: str
    origin_input_ids: array
    slot: int = 0
    kv: SimpleNamespace | None = None
    output_ids: array = field(default_factory=lambda: array("q"))
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
    slots_allocated: int = 0
    is_finished: bool = False
    is_counted: bool = False
    time_stats: None = None
    sampling_params: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(json_schema=None))
    finished_reason: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(to_json=lambda: {"type": "stop"})
    )
    finished_len: int | None = None
    to_finish: object = None

    @property
    def output_ids_through_stop(self) -> array:
        return self.output_ids[: self.finished_len]

    @property
    def full_untruncated_fill_ids(self) -> array:
        return self.origin_input_ids + self.output_ids

    @property
    def extend_end(self) -> int:
        return self.filled

    def get_fill_ids(self) -> array:
        return (self.origin_input_ids + self.output_ids)[: self.filled]

    def owned_kv_len(self) -> int:
        return self.filled

    def finished(self) -> bool:
        return self.is_finished


class OutOfMemory(Exception):
    """The pool is full of running requests."""


class TreeDriver:
    """A scheduler's worth of calls on one cache."""

    def __init__(
        self,
        kind: CacheKind = "importance",
        *,
        tokens: int = 256,
        page_size: int = PAGE,
        requests: int = 8,
        max_context: int = 512,
        options: ImportanceOptions | None = None,
        recorder: Recorder | None = None,
        policy: ImportancePolicy | None = None,
    ) -> None:
        self.page_size = page_size
        self.rows = ScriptedRows()
        self.cache = build_cache(
            kind,
            tokens=tokens,
            page_size=page_size,
            requests=requests,
            max_context=max_context,
            options=options,
            rows=cast(ScoreRows, self.rows),
            recorder=recorder,
            policy=policy,
        )
        self.core = self.cache.tree_core
        self.core.set_hicache_enabled()
        self.core.write_through_threshold = 10**9  # the driver decides what is backed up
        self._serial = 0
        self._free_slots = list(range(1, requests))
        self._next_host_slot = 0
        self.loaded_back = 0

    @property
    def component(self):
        assert isinstance(self.cache, ImportanceRadixCache)
        return self.cache.importance

    def filter_backups(self) -> None:
        """As a server's cache asks ours ahead of every copy to the host."""
        self.component.backups = BackupFilter(self.component.state, self.core)

    def all_nodes(self):
        stack = list(self.core.root_node.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # ---- requests ----

    def admit(self, tokens: list[int], salt: str | None = None) -> Request:
        """Matches, loads host pages back, and locks; OutOfMemory leaves everything as it was."""
        self._serial += 1
        request = Request(str(self._serial), array("q", tokens), cache_salt=salt)
        self._match_and_lock(request)
        return request

    def _match_and_lock(self, request: Request) -> None:
        key = RadixKey(request.origin_input_ids[:-1], request.extra_key, cache_salt=request.cache_salt)
        match = self.cache.match_prefix(MatchPrefixParams(key=key))
        if match.host_hit_length:
            self.load_back(match.best_match_node)
            match = self.cache.match_prefix(MatchPrefixParams(key=key))
        request.slot = self._free_slots.pop()
        request.kv = SimpleNamespace(
            req_pool_idx=request.slot, cache_protected_len=0, cache_inserted_len=0, holds_kv=True
        )
        found = matched_slots(self.cache, match)
        cached = request.prefix_len = len(found)
        request.last_node = match.last_device_node
        lock_match(self.cache, request)
        request.kv.cache_protected_len = cached
        request.cached_tokens_device = cached
        request.filled = request.slots_allocated = cached
        self._row(request)[:cached] = found
        request.prefix_indices = found

    def prefill(self, request: Request, up_to: int | None = None, body: np.ndarray | None = None) -> None:
        """Computes the prompt up to ``up_to`` (a chunk) or to its end, and caches it."""
        total = len(request.origin_input_ids)
        stop = total if up_to is None else min(up_to, total)
        self._extend(request, stop)
        if body is not None:
            self.rows.put(request.slot, Phase.PREFILL, body)
        insert_unfinished(self.cache, request, up_to=stop, is_chunk=stop < total)

    def decode(self, request: Request, tokens: list[int], body: np.ndarray | None = None) -> None:
        request.output_ids.extend(tokens)
        self._extend(request, len(request.origin_input_ids) + len(request.output_ids))
        if body is not None:
            self.rows.put(request.slot, Phase.DECODE, body)

    def finish(self, request: Request) -> None:
        request.is_finished = True
        self._release(request, insert=True)

    def retract(self, request: Request) -> None:
        """Gives the memory back; ``readmit`` continues the request."""
        self._release(request, insert=False)

    def abort(self, request: Request) -> None:
        request.is_finished = True
        self._release(request, insert=False)

    def readmit(self, request: Request) -> None:
        request.origin_input_ids = request.origin_input_ids + request.output_ids
        request.output_ids = array("q")
        self._match_and_lock(request)

    def _row(self, request: Request) -> torch.Tensor:
        return self.cache.req_to_token_pool.req_to_token[request.slot]

    def _extend(self, request: Request, stop: int) -> None:
        missing = stop - request.slots_allocated
        if missing > 0:
            size = -(-missing // self.page_size) * self.page_size
            allocator = self.cache.token_to_kv_pool_allocator
            if allocator.available_size() < size:
                self.cache.evict(EvictParams(num_tokens=size - allocator.available_size()))
            slots = allocator.alloc(size)
            if slots is None:
                raise OutOfMemory
            start = request.slots_allocated
            self._row(request)[start : start + size] = slots
            request.slots_allocated += size
        request.filled = stop

    def _release(self, request: Request, *, insert: bool) -> None:
        owned = request.filled
        if insert:
            insert_finished(self.cache, request, up_to=owned)
        protected = request.kv.cache_protected_len
        tail = self._row(request)[protected : request.slots_allocated]
        if len(tail):
            self.cache.token_to_kv_pool_allocator.free(tail.to(torch.int64).clone())
        release(self.cache, request, inserted=insert)
        self.rows.discard(request.slot)
        self._free_slots.append(request.slot)

    # ---- tiers ----

    def evict(self, tokens: int) -> int:
        return self.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted

    def evict_host(self, tokens: int) -> None:
        result = self.core.drive_host_eviction(ComponentType.FULL, tokens)
        self.cache._free_values(result.device_frees, result.host_frees)

    def back_up(self, node_id: int) -> None:
        """Copies a node and everything above it to the host, ancestors first."""
        for node in self.component.state.tree.path(self.core.node_by_id(node_id)):
            if node.evicted or node.backuped:
                continue
            start = self._next_host_slot
            self._next_host_slot += len(node.key)
            self.core.commit_backup(node.id, torch.arange(start, self._next_host_slot), {})
            self.core.mark_write_through_pending([node.id], ack_id=node.id)
            self.core.finish_write_through([node.id], ack_id=node.id)

    def load_back(self, node_id: int) -> None:
        transfer, others = self.core.build_load_back_spec(node_id)
        size = len(transfer.host_indices)
        lock = self.cache.inc_lock_ref(node_id).to_dec_params()
        allocator = self.cache.token_to_kv_pool_allocator
        if allocator.available_size() < size:
            self.cache.evict(EvictParams(num_tokens=size - allocator.available_size()))
        slots = allocator.alloc(size)
        self.cache.dec_lock_ref(node_id, lock)
        if slots is None:
            raise OutOfMemory
        self.core.commit_load_back(node_id, slots, transfer, others)
        self.core.finish_load_back(node_id)
        self.loaded_back += 1

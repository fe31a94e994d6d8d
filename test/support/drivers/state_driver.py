"""The real tree of a model with linear attention, with requests one at a time and no model.

Tree, allocators and the pool of states are sglang's; states are never computed, and are a few bytes each.
Admission, prefill, decode and end follow sglang's scheduler, in both strategies: ``no_buffer``, in which a
state stands where a prompt and where an answer ended, and ``extra_buffer``, in which one stands at the last
whole chunk of a prompt, where prompts part, and at every so many tokens of an answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.runtime_context import get_context

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

CHUNK_TOKENS = 64  # of a prompt, from state to state, with ``extra_buffer``
TRACK_TOKENS = 256  # of an answer
LAYERS = [0]
REQUESTS = 4
FREE_STATES = 3  # that sglang wants for a request to come


@contextmanager
def state_config() -> Iterator[None]:
    """sglang's process-wide configuration that its component of states reads."""
    with get_context().override_server_args(
        _mamba_cache_chunk_size=CHUNK_TOKENS, mamba_track_interval=TRACK_TOKENS
    ):
        yield


@dataclass
class StateRequest:
    """What the cache reads of a request."""

    rid: str
    origin_input_ids: array
    kv: ReqKvInfo = field(default_factory=ReqKvInfo)
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
    mamba_branching_seqlen: int | None = None
    filled: int = 0
    allocated: int = 0
    is_finished: bool = False
    time_stats: None = None
    finished_len: int | None = None
    sampling_params: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(json_schema=None))
    finished_reason: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(to_json=lambda: {"type": "stop"})
    )

    @property
    def output_ids_through_stop(self) -> array:
        return self.output_ids

    @property
    def full_untruncated_fill_ids(self) -> array:
        return self.origin_input_ids + self.output_ids

    @property
    def extend_end(self) -> int:
        return self.filled

    def get_fill_ids(self) -> array:
        return (self.origin_input_ids + self.output_ids)[: self.filled]

    def finished(self) -> bool:
        return self.is_finished


def _state_requests(states: int, max_context: int, extra_buffer: bool) -> HybridReqToTokenPool:
    one = ("tp_world_size", "intermediate_size", "n_groups", "num_heads", "head_dim", "state_size")
    shape = Mamba2StateShape.create(**dict.fromkeys(one, 1), conv_kernel=2)
    return HybridReqToTokenPool(
        size=REQUESTS,
        mamba_size=states,
        mamba_spec_state_size=0,
        max_context_len=max_context,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=LAYERS),
        mamba_layer_ids=LAYERS,
        enable_mamba_extra_buffer=extra_buffer,
    )


class StateDriver:
    """One cache, and requests on it. Use within ``state_config``.

    Args:
        kind: stock's LRU on either tree core, or ours.
        tokens: of the KV pool.
        states: of the pool of states, where three are free whenever a request begins; 0 for a model without.
        extra_buffer: the strategy of GPUs, in pages of 16 tokens; else pages are of one.
    """

    def __init__(
        self,
        kind: CacheKind,
        *,
        tokens: int,
        states: int,
        extra_buffer: bool = False,
        max_context: int = 8192,
        options: ImportanceOptions | None = None,
        policy: ImportancePolicy | None = None,
    ) -> None:
        self._extra_buffer = extra_buffer and states > 0
        self.page_size = 16 if extra_buffer else 1
        self.states = states
        self.cache = build_cache(
            kind,
            tokens=tokens,
            page_size=self.page_size,
            requests=REQUESTS,
            max_context=max_context,
            options=options,
            policy=policy,
            state_requests=_state_requests(states, max_context, extra_buffer) if states else None,
        )
        self.requests: Any = self.cache.req_to_token_pool
        self._serial = 0

    def serve(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """One request from its admission to its end; prompt tokens that it found in the cache."""
        request = self.admit(prompt)
        hit = request.cached_tokens_device
        self.prefill(request)
        self.decode(request, answer)
        self.finish(request)
        return hit

    def admit(self, prompt: Sequence[int]) -> StateRequest:
        self._serial += 1
        request: Any = StateRequest(str(self._serial), array("q", prompt))
        key = RadixKey(request.origin_input_ids[:-1], None)
        match = self.cache.match_prefix(MatchPrefixParams(key=key, cow_mamba=bool(self.states), req=request))
        request.prefix_indices = found = matched_slots(self.cache, match)
        cached = request.prefix_len = len(found)
        request.mamba_branching_seqlen = match.mamba_branching_seqlen
        request.last_node = match.last_device_node
        lock_match(self.cache, request)
        if self.states:
            self._make_room_for_states()
        assert self.requests.alloc([request]), "one request at a time"
        request.kv.cache_protected_len = request.cached_tokens_device = cached
        request.filled = request.allocated = cached
        self._row(request)[:cached] = found
        return request

    def prefill(self, request: StateRequest) -> None:
        total, prefix = len(request.origin_input_ids), request.filled
        self._extend(request, total)
        computed = total - prefix
        if (
            self._extra_buffer and computed >= CHUNK_TOKENS
        ):  # ``_mamba_radix_cache_v2_req_prepare_for_extend``
            self._track(request)
            end = prefix + computed // CHUNK_TOKENS * CHUNK_TOKENS
            branch = request.mamba_branching_seqlen
            if branch is not None and prefix < branch < end and (branch - prefix) % CHUNK_TOKENS == 0:
                end = branch
            request.kv.mamba_last_track_seqlen = end
        insert_unfinished(self.cache, request, up_to=request.filled, is_chunk=False)

    def decode(self, request: StateRequest, answer: Sequence[int]) -> None:
        start = request.filled
        request.output_ids.extend(answer)
        self._extend(request, start + len(answer))
        if self._extra_buffer:
            for end in range(start + 1, request.filled + 1):
                if end % TRACK_TOKENS == 0:
                    self._track(request)
                    request.kv.mamba_last_track_seqlen = end

    def finish(self, request: Any) -> None:
        request.is_finished = True
        insert_finished(self.cache, request, up_to=request.filled)
        tail = self._row(request)[request.kv.cache_protected_len : request.allocated]
        if len(tail):
            self.cache.token_to_kv_pool_allocator.free(tail.to(torch.int64).clone())
        release(self.cache, request, inserted=True)
        self.requests.free(request)

    def _track(self, request: StateRequest) -> None:
        """The next copy of the request's state goes to the other slot of its two."""
        kv = request.kv
        kv.mamba_last_track_idx = kv.mamba_next_track_idx
        kv.mamba_next_track_idx = self.requests.get_mamba_ping_pong_other_idx(kv.mamba_next_track_idx)

    def _make_room_for_states(self) -> None:
        """As ``alloc_req_slots`` does."""
        free = self.requests.mamba_allocator.schedulable_available_size()
        if free < FREE_STATES:
            short = FREE_STATES - free
            self.cache.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=short))

    def _row(self, request: StateRequest) -> torch.Tensor:
        return self.requests.req_to_token[request.kv.req_pool_idx]

    def _extend(self, request: StateRequest, stop: int) -> None:
        missing = stop - request.allocated
        if missing > 0:
            size = -(-missing // self.page_size) * self.page_size
            allocator = self.cache.token_to_kv_pool_allocator
            if allocator.available_size() < size:
                self.cache.evict_for_alloc(EvictParams(num_tokens=size - allocator.available_size()))
            slots = allocator.alloc(size)
            assert slots is not None, "the pool is smaller than one request"
            self._row(request)[request.allocated : request.allocated + size] = slots
            request.allocated += size
            request.kv.kv_allocated_len = request.allocated
        request.filled = stop

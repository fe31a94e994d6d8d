"""The tree driver over upstream's own host tier: its pool, its transfers, its three write policies.

Every KV slot holds a stamp of the token's whole prefix, so that a page that comes back wrong, or under the
wrong salt, is seen at the next match.
"""

from __future__ import annotations

import atexit
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sgl_importance.embedded_model import checkpoint_path
from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance_lab.offline.request_steps import lock_match, matched_slots
from sgl_importance_lab.offline.standalone_cache import CacheKind
from sglang_importance.observe.recorder import Recorder

from support.drivers.tree_driver import PAGE, OutOfMemory, Request, TreeDriver

STAMPS = 2**24  # float32 holds every integer below


def stamps(tokens: array, salt: str | None) -> torch.Tensor:
    """One number per token that stands for everything up to it, float32 [tokens]."""
    ids = np.asarray(tokens, dtype=np.int64)
    weighted = (ids + 1) * (2 * np.arange(len(ids)) + 1)
    seed = 0 if salt is None else 7919 * (1 + sum(salt.encode()))
    return torch.from_numpy(((np.cumsum(weighted) + seed) % STAMPS).astype(np.float32))


WriteMode = Literal["write_through", "write_through_selective", "write_back"]


def attach_host_tier(
    cache: UnifiedRadixCache, *, model: Path, write_policy: WriteMode = "write_through", ratio: float = 2.0
) -> None:
    """Gives the cache upstream's own host pool and transfers, as ``--enable-hierarchical-cache`` does.

    Publishes the flags to this process (upstream reads them from there), so it is for processes that serve
    nothing else.

    Args:
        cache: a cache of ``build_cache``, still empty.
        model: folder of any checkpoint; only its configuration is read.
        write_policy: when nodes are copied to the host.
        ratio: size of the host pool, as a multiple of the device pool.
    """
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    load_plugins()  # without an accelerator the host pool needs our CPU runtime
    args = ServerArgs(
        model_path=str(model),
        device="cpu",
        enable_hierarchical_cache=True,
        hicache_ratio=ratio,
        hicache_write_policy=write_policy,
        page_size=cache.page_size,
    )
    publish(args, role="scheduler")
    cache.init_hicache(
        args,
        CacheInitParams(
            disable=False,
            req_to_token_pool=cache.req_to_token_pool,
            token_to_kv_pool_allocator=cache.token_to_kv_pool_allocator,
            page_size=cache.page_size,
            tree_components=(ComponentType.FULL,),
        ),
    )
    # Upstream would keep the cache alive until the end of the process.
    atexit.unregister(cache.shutdown)


class HostedDriver(TreeDriver):
    """A scheduler's worth of calls on a cache with a device and a host tier.

    Attributes:
        evicted: device tokens that upstream says were evicted.
        hits: prompt tokens found by the first match of each admitted request, on device and host.
    """

    def __init__(
        self,
        kind: CacheKind = "importance",
        *,
        write_policy: WriteMode = "write_through",
        tokens: int = 1024,
        options: ImportanceOptions | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(kind, tokens=tokens, options=options, recorder=recorder)
        self.write_policy = write_policy
        attach_host_tier(self.cache, model=checkpoint_path(), write_policy=write_policy)
        self.evicted = 0
        self._count_evictions()
        self.hits = {"device": 0, "host": 0}
        self.checked_tokens = 0

    def _count_evictions(self) -> None:
        evict_components = self.cache._evict_components

        def counting(request_by_type, tracker, *args, **kwargs):
            evict_components(request_by_type, tracker, *args, **kwargs)
            self.evicted += tracker[ComponentType.FULL]

        self.cache._evict_components = counting

    @property
    def host_pool(self):
        return self.cache.cache_controller.mem_pool_host

    # ---- requests ----

    def admit(self, tokens: list[int], salt: str | None = None) -> Request:
        self._serial += 1
        request = Request(str(self._serial), array("q", tokens), cache_salt=salt)
        self._match_and_lock(request)
        return request

    def _match_and_lock(self, request: Request) -> None:
        key = RadixKey(request.origin_input_ids[:-1], request.extra_key, cache_salt=request.cache_salt)
        match = self.cache.match_prefix(MatchPrefixParams(key=key))
        request.kv = SimpleNamespace(mamba_pool_idx=None)
        request.last_node = match.last_device_node
        prefix = matched_slots(self.cache, match)
        on_device = len(prefix)
        if match.host_hit_length:
            loaded, request.last_node = self.cache.init_load_back(
                InitLoadBackParams(
                    best_match_node=match.best_match_node,
                    host_hit_length=match.host_hit_length,
                    req=request,
                )
            )
            if not isinstance(loaded, torch.Tensor):  # later releases name how many
                path = self.cache.path_device_indices(request.last_node)
                loaded = path[on_device : on_device + loaded]
            prefix = torch.cat((prefix, loaded))
            self.loaded_back += len(loaded) > 0
            self.cache.ready_to_load_host_cache()
        self._lock(request, prefix)
        request.cached_tokens_device = on_device
        request.cached_tokens_host = len(prefix) - on_device
        self._check_content(request, prefix)

    def prefill(self, request: Request, up_to: int | None = None, body: np.ndarray | None = None) -> None:
        super().prefill(request, up_to, body)
        if not request.is_counted:
            # Admitted when its first chunk is cached; readmitted, it does not count again.
            request.is_counted = True
            self.hits["device"] += request.cached_tokens_device
            self.hits["host"] += request.cached_tokens_host

    def _lock(self, request: Request, prefix: torch.Tensor) -> None:
        cached = len(prefix)
        request.slot = self._free_slots.pop()
        request.kv = SimpleNamespace(
            req_pool_idx=request.slot, cache_protected_len=cached, cache_inserted_len=0, holds_kv=True
        )
        lock_match(self.cache, request)
        request.filled = request.slots_allocated = cached
        self._row(request)[:cached] = prefix
        request.prefix_indices = prefix
        request.prefix_len = cached

    def _check_content(self, request: Request, prefix: torch.Tensor) -> None:
        expected = stamps(request.origin_input_ids[: len(prefix)], request.cache_salt)
        held = self._keys[prefix].flatten()
        assert torch.equal(held, expected), f"request {request.rid} found KV of another prefix"
        self.checked_tokens += len(prefix)

    @property
    def _keys(self) -> torch.Tensor:
        return self.cache.token_to_kv_pool_allocator.get_kvcache().k_buffer[0]

    def _extend(self, request: Request, stop: int) -> None:
        start = request.filled
        super()._extend(request, stop)
        sequence = request.origin_input_ids + request.output_ids
        written = stamps(sequence[:stop], request.cache_salt)[start:]
        self._keys[self._row(request)[start:stop].to(torch.int64)] = written.view(-1, 1, 1)

    # ---- what the scheduler does between batches ----

    def step(self) -> None:
        """Polls transfers, as every scheduler step does."""
        self.cache.check_hicache_events()

    def settle(self) -> None:
        """Waits for every transfer; nothing is locked by one afterwards."""
        self.cache.writing_check(write_back=True)
        self.cache.loading_check()
        assert not self.cache.ongoing_write_through
        assert not self.cache.ongoing_load_back

    def evict_host(self, tokens: int) -> None:
        self.cache.evict_host(tokens)

    def flush(self) -> None:
        """What ``POST /flush_cache`` does to an idle server."""
        self.cache.reset()
        self.cache.req_to_token_pool.clear()
        self.cache.token_to_kv_pool_allocator.clear()


__all__ = ["PAGE", "HostedDriver", "OutOfMemory", "Request", "stamps"]

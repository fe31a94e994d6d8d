"""The HiCache host tier without CUDA: unpinned memory, copies by torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import psutil
import torch

from sglang_importance.cpu.shim import Shim


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copies tokens between layer-first buffers [slots, ...], one pair of buffers per layer."""
    for source, destination in zip(src_layers, dst_layers, strict=True):
        destination[dst_indices] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copies one layer from page-first buffers [pages, layers, page_size, ...] to layer-first ones."""
    pages, offsets = src_indices // page_size, src_indices % page_size
    for source, destination in zip(src_ptrs, dst_ptrs, strict=True):
        destination[dst_indices] = source[pages, layer_id, offsets]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copies all layers from layer-first buffers (K of every layer, then V) to page-first ones."""
    pages, offsets = dst_indices // page_size, dst_indices % page_size
    num_layers = len(src_ptrs) // len(dst_ptrs)
    for i, source in enumerate(src_ptrs):
        dst_ptrs[i // num_layers][pages, i % num_layers, offsets] = source[src_indices]


class TransferKernels(Shim):
    defect = (
        "the transfer functions are imported on CUDA and HIP only (mem_cache/pool_host/mha.py:54, mla.py:51, "
        "mamba.py:27)"
    )

    _FUNCTIONS = (transfer_kv_direct, transfer_kv_per_layer_direct_pf_lf, transfer_kv_all_layer_direct_lf_pf)

    def needed(self) -> bool:
        return any(not hasattr(pools, "transfer_kv_direct") for pools in self._modules())

    def apply(self) -> None:
        for pools in self._modules():
            for function in self._FUNCTIONS:
                setattr(pools, function.__name__, function)

    def _modules(self) -> tuple[ModuleType, ...]:
        from sglang.srt.mem_cache.pool_host import mamba, mha, mla

        return mamba, mha, mla


class UnpinnedHostMemory(Shim):
    defect = (
        "host pools and storage pages are pinned: cudart AssertionError (pool_host/common.py:140), and the "
        "prefetch thread dies (pool_host/mha.py:601), which hangs wait_complete requests"
    )

    def needed(self) -> bool:
        return not torch.cuda.is_available()

    def apply(self) -> None:
        from sglang.srt.mem_cache.pool_host.base import HostKVCache
        from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        # That of states calls no constructor of its base class.
        for pool in (HostKVCache, MambaPoolHost):
            target = f"{pool.__module__}.{pool.__qualname__}.__init__"
            HookRegistry.register(target, _without_pins(pool), HookType.AROUND)


def _without_pins(pool: type) -> Callable[..., None]:
    # Positional up to 0.5.21, a keyword from 0.5.22 on.
    signature = inspect.signature(pool.__init__)  # type: ignore[misc]

    def unpinned(original: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["pin_memory"] = False
        original(*bound.args, **bound.kwargs)

    return unpinned


class SmallerReserve(Shim):
    defect = (
        "10 GiB of host memory must stay free beside a host pool of any size (pool_host/base.py:29): "
        "a laptop has no host tier at all"
    )

    SHARE = 0.1

    def needed(self) -> bool:
        from sglang.srt.mem_cache.pool_host import base

        return self._bytes() < base.HICACHE_HOST_MEMORY_RESERVE_BYTES

    def apply(self) -> None:
        from sglang.srt.mem_cache.pool_host import base

        base.HICACHE_HOST_MEMORY_RESERVE_BYTES = self._bytes()

    def _bytes(self) -> int:
        return int(self.SHARE * psutil.virtual_memory().total)


class DirectTransfers(Shim):
    defect = "the default io backend 'kernel' needs CUDA, 'direct' does not (arg_groups/hicache_hook.py:18)"

    def needed(self) -> bool:
        return not torch.cuda.is_available()

    def apply(self) -> None:
        from sglang.srt.arg_groups.overrides import declare_resolution
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

        def use_direct(server_args: Any, resolve: Callable[[Any], None]) -> None:
            declare_resolution(server_args, "sgl_importance.cpu", hicache_io_backend="direct")
            resolve(server_args)  # picks the layout that goes with it

        register_resolution_hook("handle_hicache")(use_direct)

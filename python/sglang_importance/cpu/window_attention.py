"""Sliding windows with a KV pool of their own, and learnt sinks, without a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from sglang_importance.cpu.attention import decoded, extended
from sglang_importance.cpu.request_attention import QueriedRequest, attend_requests
from sglang_importance.cpu.shim import Shim

if TYPE_CHECKING:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class WindowPoolAndSinks(Shim):
    defect = (
        "torch_native reads the pool of sliding windows at the locations of the other pool, and takes no "
        "sinks (layers/attention/torch_native_backend.py:139, 239, 268)"
    )

    def needed(self) -> bool:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        forward = TorchNativeAttnBackend.forward_extend
        return "sinks" not in inspect.signature(forward, follow_wrapped=False).parameters

    def apply(self) -> None:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        backend: Any = TorchNativeAttnBackend
        backend.forward_extend = _with_windows(TorchNativeAttnBackend.forward_extend, _extending)
        backend.forward_decode = _with_windows(TorchNativeAttnBackend.forward_decode, _decoding)


def _with_windows(
    upstream: Callable[..., torch.Tensor], queried: Callable[[ForwardBatch], Iterator[QueriedRequest]]
) -> Callable[..., torch.Tensor]:
    @wraps(upstream)  # the self-check compares upstream's own signature
    def forward(
        backend: TorchNativeAttnBackend,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        in_window_pool = backend.use_sliding_window_kv_pool and layer.sliding_window_size > -1
        if sinks is None and not in_window_pool:
            return upstream(backend, q, k, v, layer, forward_batch, save_kv_cache)
        pool: Any = backend.token_to_kv_pool
        if save_kv_cache and k is not None:
            from sglang.srt.mem_cache.memory_pool import KVWriteLoc

            pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, backend.swa_out_cache_loc), k, v
            )
        requests: Any = backend.req_to_token_pool
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return attend_requests(
            query,
            query.new_zeros(len(query), layer.tp_q_head_num, layer.v_head_dim),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            requests.req_to_token,
            queried(forward_batch),
            scaling=layer.scaling,
            window=layer.sliding_window_size,
            sinks=sinks,
            locate=pool.translate_loc_from_full_to_swa if in_window_pool else None,
        ).flatten(1)

    return forward


def _extending(batch: ForwardBatch) -> Iterator[QueriedRequest]:
    if batch.forward_mode.is_target_verify():
        raise NotImplementedError("speculative decoding over sliding windows or sinks needs an accelerator")
    assert batch.extend_seq_lens is not None
    return extended(batch.req_pool_indices, batch.seq_lens, batch.extend_seq_lens)


def _decoding(batch: ForwardBatch) -> Iterator[QueriedRequest]:
    return decoded(batch.req_pool_indices, batch.seq_lens)

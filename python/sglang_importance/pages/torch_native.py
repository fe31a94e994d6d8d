"""sglang's torch-native attention over pages in tiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sgl_importance_kernels.pages.streamed_attention import (
    PartialAttention,
    attend_causally,
    stream_attention,
)
from sglang_importance.attention.source import request_table
from sglang_importance.attention.torch_native import EmittingTorchNativeBackend
from sglang_importance.pages.pool import TieredKVPool

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class _Request:
    """A request of a forward pass.

    Attributes:
        rows: its rows in the batch's tensors.
        context: tokens in the pool that its rows attend to through pages.
        pages: those tokens' pages, in order; int64 [pages].
    """

    rows: slice
    context: int
    pages: torch.Tensor


class TieredTorchNativeBackend(TorchNativeAttnBackend):
    """Exact attention that holds no more of a context on the device than slots and staging buffer."""

    token_to_kv_pool: TieredKVPool

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        assert isinstance(self.token_to_kv_pool, TieredKVPool), "sglang built another pool"
        self._requests: list[_Request] = []

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self.token_to_kv_pool.begin_pass(forward_batch.out_cache_loc)
        table = request_table(self.req_to_token_pool)
        page_size = self.token_to_kv_pool.page_size
        if forward_batch.forward_mode.is_decode():
            contexts = forward_batch.seq_lens.tolist()
            new = [1] * len(contexts)
        else:
            assert forward_batch.extend_prefix_lens is not None
            assert forward_batch.extend_seq_lens is not None
            contexts = forward_batch.extend_prefix_lens.tolist()
            new = forward_batch.extend_seq_lens.tolist()
        self._requests = []
        start = 0
        for slot, context, tokens in zip(forward_batch.req_pool_indices.tolist(), contexts, new, strict=True):
            pages = table[slot, :context:page_size].long() // page_size
            self._requests.append(_Request(slice(start, start + tokens), context, pages))
            start += tokens

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, is_extend=True)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, is_extend=False)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        *,
        save_kv_cache: bool,
        is_extend: bool,
    ) -> torch.Tensor:
        """An extend's own tokens attend to each other as they are, all else goes through pages."""
        assert save_kv_cache, "tiered pages need every layer's own keys and values in the pool"
        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        heads = layer.tp_q_head_num
        queries = q.reshape(-1, heads, layer.qk_head_dim)
        output = q.new_empty(q.shape[0], heads * layer.v_head_dim)
        results = output.view(-1, heads, layer.v_head_dim)
        for request in self._requests:
            rows = request.rows
            sums = PartialAttention()
            self._stream(sums, queries[rows], request, layer)
            if is_extend:
                sums.add(*attend_causally(queries[rows], k[rows], v[rows], layer.scaling))
            results[rows] = sums.output.to(output.dtype)
        return output

    def _stream(
        self, sums: PartialAttention, queries: torch.Tensor, request: _Request, layer: RadixAttention
    ) -> None:
        pool = self.token_to_kv_pool
        stream_attention(
            sums,
            queries,
            pool.slots,
            layer.layer_id - pool.start_layer,
            request.pages,
            request.context,
            layer.scaling,
        )


class EmittingTieredBackend(EmittingTorchNativeBackend, TieredTorchNativeBackend):
    """The same with page scores, which are computed from the keys on the host."""

"""Sliding windows with a KV pool of their own, and learnt sinks, without a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from sglang_importance.cpu.shim import Shim

if TYPE_CHECKING:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

BLOCK_QUERIES = 64
"""Query tokens that attend at a time: a block has a mask of them, times the heads of a group, times keys."""


@dataclass(frozen=True, slots=True)
class QueriedRequest:
    """One request of a batch.

    Attributes:
        row: of the request table.
        seq_len: tokens of the sequence, the queries included.
        first_query: row of its first query in the batch's query tensor.
        num_q: queries, the last tokens of the sequence.
    """

    row: int
    seq_len: int
    first_query: int
    num_q: int


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    window: int,
    scaling: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention of the last tokens of a sequence over its end.

    Args:
        query: [num_q, num_heads, head_dim].
        keys: of the last tokens of the sequence, [kv_len, num_kv_heads, head_dim]; kv_len >= num_q.
        values: [kv_len, num_kv_heads, value_dim].
        window: tokens before itself that a query sees; below 0, all.
        scaling: factor on the logits.
        sinks: learnt logit of each head that takes part in its softmax, [num_heads]; None for none.

    Returns:
        [num_q, num_heads, value_dim], in the queries' dtype.
    """
    first_position = len(keys) - len(query)
    output = query.new_empty(*query.shape[:2], values.shape[-1])
    for first in range(0, len(query), BLOCK_QUERIES):
        block = query[first : first + BLOCK_QUERIES]
        start = max(0, first_position + first - window) if window >= 0 else 0
        seen = slice(start, first_position + first + len(block))
        output[first : first + len(block)] = _attend_block(
            block, keys[seen], values[seen], window, scaling, sinks
        )
    return output


def _attend_block(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int,
    scaling: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """``attend`` of a few tokens, in memory of a few times queries times keys."""
    num_q, num_heads, _ = query.shape
    kv_len, num_kv_heads, value_dim = values.shape
    group = num_heads // num_kv_heads
    behind = torch.arange(kv_len - num_q, kv_len)[:, None] - torch.arange(kv_len)
    hidden = behind < 0
    if window >= 0:
        hidden |= behind > window
    mask = torch.zeros(num_q, kv_len, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
    # The heads of a group stand among the rows, so that keys and values are not copied for each of them.
    rows = query.unflatten(1, (num_kv_heads, group)).movedim(1, 0).flatten(1, 2)
    width = max(query.shape[-1], value_dim)  # which the operator wants to be one
    inputs = (
        pad(tensor, (0, width - tensor.shape[-1])).unsqueeze(0).to(query.dtype)
        for tensor in (rows, keys.movedim(0, 1), values.movedim(0, 1))
    )
    # The public function keeps the log-sum to itself; this is the operator behind it.
    attended, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *inputs, 0.0, False, attn_mask=mask.repeat_interleave(group, dim=0)[None, None], scale=scaling
    )
    output = attended[0, ..., :value_dim].unflatten(1, (num_q, group))
    if sinks is not None:
        # A sink is one more logit in the softmax: this part of it goes to keys.
        by_group = sinks.float().view(num_kv_heads, 1, group)
        left = torch.sigmoid(log_sums.view(num_kv_heads, num_q, group) - by_group)
        output = output * left[..., None]
    result: torch.Tensor = output.movedim(0, 1).flatten(1, 2).to(query.dtype)
    return result


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
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        requests: Any = backend.req_to_token_pool
        table: torch.Tensor = requests.req_to_token
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        output = query.new_zeros(len(query), layer.tp_q_head_num, layer.v_head_dim)
        window = layer.sliding_window_size
        for request in queried(forward_batch):
            queries = slice(request.first_query, request.first_query + request.num_q)
            # What lies further back may be somebody else's by now.
            start = max(0, request.seq_len - request.num_q - window) if window > -1 else 0
            locations = table[request.row, start : request.seq_len]
            if in_window_pool:
                locations = pool.translate_loc_from_full_to_swa(locations)
            output[queries] = attend(
                query[queries],
                keys[locations],
                values[locations],
                window=window,
                scaling=layer.scaling,
                sinks=sinks,
            )
        return output.flatten(1)

    return forward


def _extending(batch: ForwardBatch) -> Iterator[QueriedRequest]:
    if batch.forward_mode.is_target_verify():
        raise NotImplementedError("speculative decoding over sliding windows or sinks needs an accelerator")
    lengths = (batch.req_pool_indices, batch.seq_lens, batch.extend_seq_lens)
    first = 0
    for row, seq_len, new in zip(*(values.tolist() for values in lengths if values is not None), strict=True):
        yield QueriedRequest(row, seq_len, first, new)
        first += new


def _decoding(batch: ForwardBatch) -> Iterator[QueriedRequest]:
    lengths = zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)
    for index, (row, seq_len) in enumerate(lengths):
        yield QueriedRequest(row, seq_len, index, 1)

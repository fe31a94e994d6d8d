"""Extend attention that computes new rows only."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_importance.cpu.shim import Shim


def extend_new_rows(
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    *,
    scaling: float | None,
    enable_gqa: bool,
    causal: bool,
) -> torch.Tensor:
    """Self-attention of each request's new tokens over its whole context.

    Args:
        query: [num_tokens, num_heads, head_dim], new tokens of all requests in a row.
        output: [num_tokens, num_heads, head_dim], written in place and returned.
        k_cache: [num_slots, num_kv_heads, head_dim].
        v_cache: [num_slots, num_kv_heads, head_dim].
        req_to_token: [max_requests, max_context] slots.
        req_pool_indices: [num_requests] rows of ``req_to_token``.
        seq_lens: [num_requests] context lengths, new tokens included.
        extend_prefix_lens: [num_requests] cached tokens.
        extend_seq_lens: [num_requests] new tokens.
        scaling: factor on the logits; None for 1 / sqrt(head_dim).
        enable_gqa: whether there are fewer KV heads than query heads.
        causal: whether a token sees only what is before it.
    """
    start = 0
    rows = zip(
        req_pool_indices.tolist(),
        seq_lens.tolist(),
        extend_prefix_lens.tolist(),
        extend_seq_lens.tolist(),
        strict=True,
    )
    for request, length, prefix, new in rows:
        slots = req_to_token[request, :length]
        keys = k_cache[slots].movedim(0, 1).to(query.dtype)
        values = v_cache[slots].movedim(0, 1).to(query.dtype)
        mask = None
        if causal and prefix:
            mask = torch.ones(new, length, dtype=torch.bool, device=query.device).tril_(prefix)
        attended = scaled_dot_product_attention(
            query[start : start + new].movedim(0, 1).unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=mask,
            enable_gqa=enable_gqa,
            scale=scaling,
            is_causal=causal and not prefix,
        )
        output[start : start + new] = attended.squeeze(0).movedim(1, 0)
        start += new
    return output


class ExtendComputesCachedRows(Shim):
    defect = (
        "torch_native computes attention for every row of the context, cached ones included "
        "(layers/attention/torch_native_backend.py:113), so a prefix hit hardly saves time"
    )

    def needed(self) -> bool:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        # Upstream's own name for the rows that it throws away.
        return "redudant" in inspect.getsource(TorchNativeAttnBackend._run_sdpa_forward_extend)

    def apply(self) -> None:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        upstream = TorchNativeAttnBackend._run_sdpa_forward_extend

        def extend(
            backend: Any,
            query: torch.Tensor,
            output: torch.Tensor,
            k_cache: torch.Tensor,
            v_cache: torch.Tensor,
            req_to_token: torch.Tensor,
            req_pool_indices: torch.Tensor,
            seq_lens: torch.Tensor,
            extend_prefix_lens: torch.Tensor,
            extend_seq_lens: torch.Tensor,
            encoder_lens: torch.Tensor | None = None,
            scaling: float | None = None,
            enable_gqa: bool = False,
            causal: bool = False,
            is_cross_attn: bool = False,
            sliding_window_size: int | None = None,
        ) -> torch.Tensor:
            tensors = (query, output, k_cache, v_cache, req_to_token, req_pool_indices)
            lengths = (seq_lens, extend_prefix_lens, extend_seq_lens)
            windowed = sliding_window_size is not None and sliding_window_size > -1
            if encoder_lens is None and not is_cross_attn and not windowed:
                return extend_new_rows(
                    *tensors, *lengths, scaling=scaling, enable_gqa=enable_gqa, causal=causal
                )
            result: torch.Tensor = upstream(
                backend,
                *tensors,
                *lengths,
                encoder_lens,
                scaling=scaling,
                enable_gqa=enable_gqa,
                causal=causal,
                is_cross_attn=is_cross_attn,
                sliding_window_size=sliding_window_size,
            )
            return result

        # Replaces the method on the class.
        TorchNativeAttnBackend._run_sdpa_forward_extend = extend  # type: ignore[assignment, method-assign]

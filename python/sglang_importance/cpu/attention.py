"""Torch-native attention that computes new rows only, and reads a decode step's context where it lies."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from typing import Any

import torch

from sglang_importance.cpu.request_attention import QueriedRequest, attend_requests
from sglang_importance.cpu.shim import Shim

SWITCH, UPSTREAM = "SGL_IMPORTANCE_CPU_ATTENTION", "upstream"


def keeps_upstream() -> bool:
    """Whether the environment asks for sglang's own attention.

    Raises:
        ValueError: the variable has another value than ``upstream``.
    """
    value = os.environ.get(SWITCH)
    if value not in (None, UPSTREAM):
        raise ValueError(
            f"{SWITCH}={value!r} is no choice: set it to {UPSTREAM}, for sglang's own attention on a CPU, "
            "or unset it"
        )
    return value == UPSTREAM


def extended(
    req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, extend_seq_lens: torch.Tensor
) -> Iterator[QueriedRequest]:
    """The requests of an extend, each behind the one before it among the queries.

    Args:
        req_pool_indices: rows of the request table, [num_requests].
        seq_lens: context lengths, new tokens included, [num_requests].
        extend_seq_lens: new tokens, [num_requests].
    """
    first = 0
    lengths = (req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist())
    for row, seq_len, new in zip(*lengths, strict=True):
        if new:
            yield QueriedRequest(row, seq_len, first, new)
        first += new


def decoded(req_pool_indices: torch.Tensor, seq_lens: torch.Tensor) -> Iterator[QueriedRequest]:
    """The requests of a decode step; arguments as in ``extended``."""
    lengths = zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    for index, (row, seq_len) in enumerate(lengths):
        yield QueriedRequest(row, seq_len, index, 1)


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
            tensors = (query, output, k_cache, v_cache, req_to_token)
            if encoder_lens is None and not is_cross_attn:
                return attend_requests(
                    *tensors,
                    extended(req_pool_indices, seq_lens, extend_seq_lens),
                    scaling=scaling,
                    causal=causal,
                    window=-1 if sliding_window_size is None else sliding_window_size,
                )
            result: torch.Tensor = upstream(
                backend,
                *tensors,
                *(req_pool_indices, seq_lens, extend_prefix_lens, extend_seq_lens, encoder_lens),
                scaling=scaling,
                enable_gqa=enable_gqa,
                causal=causal,
                is_cross_attn=is_cross_attn,
                sliding_window_size=sliding_window_size,
            )
            return result

        # Replaces the method on the class.
        TorchNativeAttnBackend._run_sdpa_forward_extend = extend  # type: ignore[assignment, method-assign]


class DecodeCopiesContext(Shim):
    defect = (
        "torch_native copies the keys and values of every context out of the pool, and then for each head of "
        "a group, in every layer of every step (layers/attention/torch_native_backend.py:234)"
    )

    def needed(self) -> bool:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        return "k_cache[per_req_tokens]" in inspect.getsource(TorchNativeAttnBackend._run_sdpa_forward_decode)

    def apply(self) -> None:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        upstream = TorchNativeAttnBackend._run_sdpa_forward_decode

        def decode(
            backend: Any,
            query: torch.Tensor,
            output: torch.Tensor,
            k_cache: torch.Tensor,
            v_cache: torch.Tensor,
            req_to_token: torch.Tensor,
            req_pool_indices: torch.Tensor,
            seq_lens: torch.Tensor,
            encoder_lens: torch.Tensor | None = None,
            scaling: float | None = None,
            enable_gqa: bool = False,
            causal: bool = False,
            is_cross_attn: bool = False,
            sliding_window_size: int | None = None,
        ) -> torch.Tensor:
            tensors = (query, output, k_cache, v_cache, req_to_token)
            if encoder_lens is None and not is_cross_attn:
                return attend_requests(
                    *tensors,
                    decoded(req_pool_indices, seq_lens),
                    scaling=scaling,
                    window=-1 if sliding_window_size is None else sliding_window_size,
                )
            result: torch.Tensor = upstream(
                backend,
                *tensors,
                *(req_pool_indices, seq_lens, encoder_lens),
                scaling=scaling,
                enable_gqa=enable_gqa,
                causal=causal,
                is_cross_attn=is_cross_attn,
                sliding_window_size=sliding_window_size,
            )
            return result

        # Replaces the method on the class.
        TorchNativeAttnBackend._run_sdpa_forward_decode = decode  # type: ignore[assignment, method-assign]

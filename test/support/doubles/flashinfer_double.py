"""A stand-in for flashinfer on a CPU: the decode wrapper's contract, ours included, in plain torch."""

from __future__ import annotations

import math
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class DecodeWrapper:
    """``BatchDecodeWithPagedKVCacheWrapper`` for pages of one token."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        assert kv_layout == "NHD"
        assert backend == "fa2"
        assert not use_cuda_graph or len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
        self.is_cuda_graph_enabled = use_cuda_graph
        self.use_tensor_cores = use_tensor_cores
        self.jit_args = jit_args
        # As FlashInfer does: kernels that were built here, or none.
        self._jit_module = None if jit_args is None else (*jit_args[7], *jit_args[9])
        self._jit_additional_tensor_names = [] if jit_args is None else list(jit_args[7])
        self.calls: list[tuple[Any, ...]] = []
        self._paged_kv_indptr_buf = paged_kv_indptr_buffer
        self._paged_kv_indices_buf = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer

    def begin_forward(self, indptr: torch.Tensor, indices: torch.Tensor, *sizes: Any, **types: Any) -> None:
        self._indptr, self._indices = indptr, indices

    def forward(
        self, q: torch.Tensor, paged_kv_cache: Any, *, sm_scale: float, k_scale: Any, **_: Any
    ) -> torch.Tensor:
        """Stock's deprecated entry, which upstream's backend calls."""
        scale = sm_scale if k_scale is None else sm_scale * k_scale
        return self._attend(q, paged_kv_cache, scale, None)[0]

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        *args: Any,
        v_scale: float | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """The customised kernels: what follows the cache is what ``jit_args`` announced, in that order."""
        assert self._jit_module is not None
        assert self._jit_additional_tensor_names == list(self._jit_module[:2])
        self.calls.append(args)
        named = dict(zip(self._jit_module, args, strict=True))
        assert named["emit_kv_head_stride"] == named["emit_logits"].stride(0)
        assert named["emit_starts"].dtype == torch.int32
        assert not named["logits_soft_cap"]
        output, log_sums = self._attend(q, paged_kv_cache, named["sm_scale"], named)
        if not return_lse:
            return output
        assert lse is not None
        assert lse.shape == q.shape[:2]
        return output, lse.copy_(log_sums / math.log(2))

    def _attend(
        self, q: torch.Tensor, cache: Any, scale: float, emission: dict[str, Any] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = cache
        group = q.shape[1] // keys.shape[1]
        outputs, log_sums = [], []
        for request in range(q.shape[0]):
            first, end = int(self._indptr[request]), int(self._indptr[request + 1])
            locations = self._indices[first:end].long()
            k, v = (cached[locations].float() for cached in (keys, values))
            grouped = q[request].float().view(keys.shape[1], group, -1)
            logits = scale * torch.einsum("hgd,khd->hkg", grouped, k)
            weights = torch.softmax(logits, dim=1)
            outputs.append(torch.einsum("hkg,khd->hgd", weights, v).flatten(0, 1).to(q.dtype))
            log_sums.append(torch.logsumexp(logits, dim=1).flatten())
            if emission is not None and (start := int(emission["emit_starts"][request])) >= 0:
                emission["emit_logits"][:, start : start + end - first] = logits
        return torch.stack(outputs), torch.stack(log_sums)


class PrefillWrapper:
    """Never run: the driver's prefill goes through torch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.is_cuda_graph_enabled = False


def module() -> ModuleType:
    double = ModuleType("flashinfer")
    double.BatchDecodeWithPagedKVCacheWrapper = DecodeWrapper
    return double


def _fast_decode_plan(wrapper: DecodeWrapper, *args: Any, **types: Any) -> None:
    DecodeWrapper.begin_forward(wrapper, *args, **types)


NAMES = {
    "BatchDecodeWithPagedKVCacheWrapper": DecodeWrapper,
    "BatchPrefillWithPagedKVCacheWrapper": PrefillWrapper,
    "BatchPrefillWithRaggedKVCacheWrapper": PrefillWrapper,
    "fast_decode_plan": _fast_decode_plan,
}
"""What upstream's backend takes from flashinfer where there is one."""


class TorchOnCpu(SimpleNamespace):
    """torch, for a module of upstream that names the device "cuda" outright."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.empty(*args, **{**kwargs, "device": "cpu"})

    def zeros(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **{**kwargs, "device": "cpu"})

"""FlashInfer's decode wrapper in plain torch: exact logits on a device, and the dry run without one."""

from __future__ import annotations

import math
from typing import Any

import torch


class TorchDecode:
    """``BatchDecodeWithPagedKVCacheWrapper`` over pages of one token, stock's or, with ``jit_args``, ours."""

    def __init__(self, *_: Any, jit_args: list[Any] | None = None, **__: Any) -> None:
        self._arguments = () if jit_args is None else (*jit_args[7], *jit_args[9])

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, *_: Any, q_data_type: torch.dtype, **__: Any
    ) -> None:
        self._bounds = indptr.tolist()
        self._indices = indices.long()

    def run(
        self,
        q: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        *arguments: Any,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> None:
        named = dict(zip(self._arguments, arguments, strict=True))
        keys, values = (tensor.squeeze(1) for tensor in cache)
        kv_heads, dim = keys.shape[1:]
        scale = named.get("sm_scale", dim**-0.5)
        starts = named["emit_starts"].tolist() if named else [-1] * len(q)
        for request, start in enumerate(starts):
            first, end = self._bounds[request : request + 2]
            locations = self._indices[first:end]
            grouped = q[request].float().view(kv_heads, -1, dim)
            logits = scale * torch.einsum("hgd,khd->hkg", grouped, keys[locations].float())
            weights = torch.softmax(logits, dim=1)
            out[request] = torch.einsum("hkg,khd->hgd", weights, values[locations].float()).flatten(0, 1)
            if start >= 0:
                named["emit_logits"][:, start : start + end - first] = logits
            if return_lse:
                assert lse is not None
                lse[request] = torch.logsumexp(logits, dim=1).flatten() / math.log(2)

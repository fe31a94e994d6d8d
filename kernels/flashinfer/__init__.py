"""Our attention variant for FlashInfer's paged decode, as arguments for FlashInfer's own compiler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("emit_logits.cuh")

QUERY_DTYPES = (torch.bfloat16, torch.float16)
KV_DTYPES = (*QUERY_DTYPES, torch.float8_e4m3fn)
HEAD_DIMS = (64, 128, 256)
LOGIT_DTYPES = {torch.float16: "half", torch.float32: "float"}
REVISION = 2  # Of the variant's arguments: compiled modules are cached under it.


@dataclass(frozen=True, slots=True)
class EmittingDecode:
    """One compiled form of the emitting decode.

    Attributes:
        tensor_cores: whether the wrapper is built with ``use_tensor_cores=True``.
        kv_dtype: of the key and value cache; queries and output are of ``dtype``.
        logit_dtype: of the emitted logits.

    Raises:
        ValueError: FlashInfer has no such kernel, or no test of ours covers it.
    """

    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    logit_dtype: torch.dtype = torch.float16
    tensor_cores: bool = False
    soft_cap: bool = False

    def __post_init__(self) -> None:
        for what, value, allowed in (
            ("heads of dimension", self.head_dim, HEAD_DIMS),
            ("queries in", self.dtype, QUERY_DTYPES),
            ("keys in", self.kv_dtype, KV_DTYPES),
            ("logits in", self.logit_dtype, tuple(LOGIT_DTYPES)),
        ):
            if value not in allowed:
                names = ", ".join(str(item) for item in allowed)
                raise ValueError(
                    f"the emitting FlashInfer decode has no kernel for {what} {value}, only {names}: "
                    "use --kv-importance-source qk_probe"
                )

    @property
    def variant(self) -> str:
        return f"EmitLogits<{str(self.tensor_cores).lower()}, {str(self.soft_cap).lower()}>"

    @property
    def uri(self) -> str:
        """Name that FlashInfer caches the module under: different for every different kernel."""
        types = (self.dtype, self.kv_dtype, self.logit_dtype)
        words = [str(dtype).removeprefix("torch.") for dtype in types]
        path = "tensor_cores" if self.tensor_cores else "cuda_cores"
        cap = "capped" if self.soft_cap else "uncapped"
        return "_".join(["sgl_importance_emit", f"r{REVISION}", path, f"d{self.head_dim}", *words, cap])

    def jit_args(self) -> list[Any]:
        """``jit_args`` of ``BatchDecodeWithPagedKVCacheWrapper``.

        ``run`` then takes, after q and the cache: the logits of this layer [num_kv_heads, tokens, group], the
        first token of each request there, negative where it is not observed, int32 [batch], and the scalars
        softmax scale, soft cap (0 for none) and the stride of a KV head in the logits, in elements.
        """
        return [
            self.uri,
            self.dtype,
            self.kv_dtype,
            self.dtype,
            torch.int32,
            self.head_dim,
            self.head_dim,
            ["emit_logits", "emit_starts"],
            [LOGIT_DTYPES[self.logit_dtype], "int32_t"],
            ["sm_scale", "logits_soft_cap", "emit_kv_head_stride"],
            ["double", "double", "int64_t"],
            self.variant,
            SOURCE.read_text(),
        ]

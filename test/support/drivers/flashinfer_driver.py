"""The attention driver over sglang's FlashInfer backend, with FlashInfer itself stood in for."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention import flashinfer_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_server_args

import sgl_importance_kernels.flashinfer as variant
from sgl_importance.options.importance_options import ImportanceOptions

from support.doubles.flashinfer_double import NAMES, TorchOnCpu, module
from support.drivers.triton_driver import HEAD_DIM, HEADS, AttentionDriver, complete


def install_double(patch: pytest.MonkeyPatch) -> None:
    """Lets upstream's backend and ours be imported and built without flashinfer and CUDA."""
    import sys

    patch.setitem(sys.modules, "flashinfer", module())
    patch.delitem(sys.modules, "sglang_importance.attention.flashinfer", raising=False)
    for name, double in NAMES.items():
        patch.setattr(flashinfer_backend, name, double, raising=False)
    patch.setattr(flashinfer_backend, "torch", TorchOnCpu())
    patch.setattr(variant, "HEAD_DIMS", (HEAD_DIM,))


class FlashInferDriver(AttentionDriver):
    """Decode through both backends, over the double or real kernels; prefill by torch into the same pool."""

    def __init__(
        self, options: ImportanceOptions, *, logit_dtype: torch.dtype = torch.float32, **kwargs: Any
    ) -> None:
        super().__init__(options, dtype=torch.bfloat16, **kwargs)
        runner = complete(self.runner)
        runner.dtype = self.dtype
        runner.init_new_workspace = False
        runner.prefill_attention_backend_str = runner.decode_attention_backend_str = "flashinfer"
        pool = runner.token_to_kv_pool
        runner.token_to_kv_pool_allocator = SimpleNamespace(get_kvcache=lambda: pool)
        runner.server_args = get_server_args()
        runner.model_config.is_multimodal = False
        runner.model_config.num_attention_heads = HEADS
        from sglang_importance.attention import flashinfer

        flashinfer.EmittingDecode = partial(variant.EmittingDecode, logit_dtype=logit_dtype)
        self.stock = _prefilled_by_torch(flashinfer_backend.FlashInferAttnBackend)(runner)
        self.backend = _prefilled_by_torch(flashinfer.EmittingFlashInferBackend)(runner, options)
        self.rows = self.backend.rows


def _prefilled_by_torch(backend: type) -> type:
    class PrefilledByTorch(backend):
        def __init__(self, runner: Any, *args: Any) -> None:
            self._torch = TorchNativeAttnBackend(runner)
            super().__init__(runner, *args)

        def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
            if forward_batch.forward_mode == ForwardMode.DECODE:
                super().init_forward_metadata(forward_batch)

        def forward_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self._torch.forward_extend(*args, **kwargs)

    return PrefilledByTorch

"""Multi-head latent attention without a GPU."""

from __future__ import annotations

from typing import Any

from sglang_importance.cpu.shim import Shim


class AbsorbedLatentAttention(Shim):
    defect = (
        "DeepSeek's attention has no method for torch_native and takes Triton's, which computes prefills "
        "from keys that torch_native does not read (models/deepseek_common/attention_backend_handler.py:45)"
    )

    _BACKEND = "torch_native"

    def needed(self) -> bool:
        from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

        return self._BACKEND not in AttentionBackendRegistry._handlers

    def apply(self) -> None:
        from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
        from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
            AttnForwardMethod,
        )

        def absorbed(attention: Any, forward_batch: Any) -> AttnForwardMethod:
            """Queries are multiplied with the latents in the pool, in prefills as in decode steps."""
            return AttnForwardMethod.MLA

        AttentionBackendRegistry.register(self._BACKEND, absorbed)

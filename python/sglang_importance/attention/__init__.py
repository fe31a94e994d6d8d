"""Attention backends that emit page scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_importance.options import ImportanceOptions

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner


def install(options: ImportanceOptions) -> None:
    """Makes this process build the emitting variant of every attention backend that has one.

    For the scheduler process, before its model runner exists, under ``observe`` and ``importance`` only.
    """
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from sglang_importance.attention.torch_native import EmittingTorchNativeBackend

    @register_attention_backend("torch_native")
    def create_torch_native_backend(model_runner: ModelRunner) -> AttentionBackend:
        if model_runner.is_draft_worker:
            return TorchNativeAttnBackend(model_runner)
        return EmittingTorchNativeBackend(model_runner, options)

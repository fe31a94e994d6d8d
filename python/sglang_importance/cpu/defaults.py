"""What sglang chooses or compiles that does not suit a machine whose only memory serves everything else."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from sglang_importance.cpu.shim import Shim

logger = logging.getLogger(__name__)

DEFAULT_POOL_TOKENS = 16_384


class SpinningThreads(Shim):
    defect = "libgomp threads spin: on few cores a small linear takes 8 ms with 4 threads and 30 us with one"

    def needed(self) -> bool:
        return "OMP_NUM_THREADS" not in os.environ

    def apply(self) -> None:
        torch.set_num_threads(1)


class PoolTakesAllMemory(Shim):
    defect = "the KV pool is sized from free RAM: 17 GB for a 5 MB model (arg_groups/memory_hook.py:47)"

    def needed(self) -> bool:
        return True

    def apply(self) -> None:
        from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

        def bound_pool(server_args: Any, resolve: Callable[[Any], None]) -> None:
            given = resolving_view(server_args)
            if given.max_total_tokens is None and given.mem_fraction_static is None:
                declare_resolution(server_args, "sgl_importance.cpu", max_total_tokens=DEFAULT_POOL_TOKENS)
                logger.info(
                    "KV importance: CPU: the KV pool holds %d tokens; --max-total-tokens changes that",
                    DEFAULT_POOL_TOKENS,
                )
            resolve(server_args)

        register_resolution_hook("handle_gpu_memory_settings")(bound_pool)


class StatesWithoutBuffer(Shim):
    defect = (
        "'auto' chooses the strategy extra_buffer for linear attention (arg_groups/overrides.py:454), which "
        "a CPU is refused then (arg_groups/mamba_hook.py:106); XPUs are spared the choice"
    )

    def needed(self) -> bool:
        from sglang.srt.arg_groups import overrides

        return overrides.supports_mamba_cache_extra_buffer is not _never

    def apply(self) -> None:
        from sglang.srt.arg_groups import overrides

        overrides.supports_mamba_cache_extra_buffer = _never


def _never(view: Any, hf_config: Any) -> bool:
    return False


class PaddedBatches(Shim):
    defect = (
        "torch_native does not say which sequence length stands for a padded request, which data-parallel "
        "attention asks every backend on a CPU (model_executor/forward_batch_info.py:1801)"
    )

    def needed(self) -> bool:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        return not hasattr(TorchNativeAttnBackend, "get_cpu_graph_seq_len_fill_value")

    def apply(self) -> None:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        # As upstream's other backend for CPUs has it; one token, so that softmax has something to sum.
        TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda backend: 1  # type: ignore[attr-defined]


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


class CompiledSamplers(Shim):
    """The penalty as sglang wrote it, and not compiled: three operations on a row of logits."""

    defect = (
        "the first request with repetition_penalty stalls all for half a minute of g++ "
        "(sampling/penaltylib/repetition_penalty.py:10)"
    )

    def needed(self) -> bool:
        return bool(_compiled())

    def apply(self) -> None:
        for module, name in _compiled():
            setattr(module, name, _original(getattr(module, name)))


def _compiled() -> list[tuple[Any, str]]:
    from sglang.srt.sampling import sampling_batch_info
    from sglang.srt.sampling.penaltylib import repetition_penalty

    functions = (
        (repetition_penalty, "apply_scaling_penalties"),
        (sampling_batch_info, "apply_scaling_penalties"),  # the same, imported by name
    )
    return [
        (module, name) for module, name in functions if _original(getattr(module, name, None)) is not None
    ]


def _original(function: Any) -> Any:
    """What ``torch.compile`` was given; None where it was not."""
    return getattr(function, "_torchdynamo_orig_callable", None)

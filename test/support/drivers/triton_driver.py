"""The attention driver over sglang's real Triton backend, in the interpreter or on a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.model_executor.cuda_graph_config import (
    Backend,
    Phase,
    default_cuda_graph_config,
    with_phase,
)
from sglang.srt.runtime_context import get_context, get_parallel
from transformers import LlamaConfig

from sgl_importance.options.importance_options import ImportanceOptions
from sglang_importance.attention.prefill_probe import QkProbe
from sglang_importance.attention.probe_emission import ProbeEmission
from sglang_importance.attention.triton import EmittingTritonBackend

from support.drivers.attention_driver import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    MAX_CONTEXT,
    AttentionDriver,
    Sequence,
    model_runner,
)

__all__ = ["ProbedTritonDriver", "Sequence", "TritonDriver", "complete", "model_runner", "runtime_context"]


def complete(runner: SimpleNamespace) -> SimpleNamespace:
    """What the Triton backend asks of a model runner beyond the torch-native one."""
    runner.gpu_id = 0
    runner.sliding_window_size = None
    runner.kv_cache_dtype = runner.token_to_kv_pool.dtype
    runner.token_to_kv_pool_allocator = None
    runner.kv_index_translator = KVIndexTranslator(
        req_to_token=runner.req_to_token_pool.req_to_token,
        token_to_kv_pool_allocator=None,
        token_to_kv_pool=runner.token_to_kv_pool,
        page_size=runner.page_size,
        device=runner.device,
    )
    runner.decode_num_tokens_per_req = lambda: 1
    runner.spec_algorithm = SimpleNamespace(is_dspark=lambda: False)
    config = runner.model_config
    config.attention_arch = AttentionArch.MHA
    config.get_max_num_attention_heads = lambda: HEADS
    config.get_num_kv_heads = lambda *_: KV_HEADS
    config.head_dim = config.v_head_dim = config.swa_v_head_dim = HEAD_DIM
    config.qk_nope_head_dim = config.qk_rope_head_dim = 0
    config.kv_lora_rank = None
    config.linear_attn_registry_result = None
    config.context_len = MAX_CONTEXT
    config.hf_config = LlamaConfig(
        architectures=["LlamaForCausalLM"], num_attention_heads=HEADS, num_key_value_heads=KV_HEADS
    )
    return runner


def runtime_context() -> Any:
    """sglang's process-wide settings; ``restore`` takes them back.

    Two splits, which 33 tokens and more fill; no CUDA graphs of prefills, which no producer observes.
    """
    graphs = with_phase(default_cuda_graph_config(), Phase.PREFILL, backend=Backend.DISABLED)
    override = get_context().override_server_args(
        device="cuda" if torch.cuda.is_available() else "cpu",
        triton_attention_num_kv_splits=2,
        cuda_graph_config=graphs,
    )
    override.install()
    get_parallel().override_permanently(attn_dcp_rank=0)
    return override


class TritonDriver(AttentionDriver):
    """Decode and extend through the emitting backend and through upstream's, outputs compared bit for bit."""

    def __init__(self, options: ImportanceOptions, **kwargs: Any) -> None:
        super().__init__(options, **kwargs)
        complete(self.runner)
        self.stock = TritonAttnBackend(self.runner)
        self.backend = EmittingTritonBackend(self.runner, options)
        self.rows = self.backend.rows


class ProbedTritonDriver(AttentionDriver):
    """The same over upstream's own backend with the qk-probe attached."""

    def __init__(self, options: ImportanceOptions, **kwargs: Any) -> None:
        super().__init__(options, **kwargs)
        complete(self.runner)
        self.stock = TritonAttnBackend(self.runner)
        self.backend = TritonAttnBackend(self.runner)
        probe = QkProbe(self.backend, self.runner, options)
        self.emission = ProbeEmission(probe, self.backend, self.runner, options)
        self.rows = probe.rows

"""The attention driver over sglang's real Triton backend in the interpreter; CUDA graphs are stood in for."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "attention"))

from attention_driver import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    MAX_CONTEXT,
    AttentionDriver,
    Sequence,
    model_runner,
)
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_context, get_parallel
from transformers import LlamaConfig

from sgl_importance.options import ImportanceOptions
from sglang_importance.attention.triton import EmittingTritonBackend

__all__ = ["GraphDriver", "Sequence", "TritonDriver", "complete", "model_runner", "runtime_context"]


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
        device="cpu",
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
    """sglang's process-wide settings; two splits for 33 tokens and more. ``restore`` takes them back."""
    override = get_context().override_server_args(device="cpu", triton_attention_num_kv_splits=2)
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


class GraphDriver(TritonDriver):
    """Decode as a CUDA graph runs it: launches frozen at capture, replayed over buffers of fixed addresses.

    Stands in for the graph: the backend's decode kernel is called at capture time only, and a replay calls it
    again with the very arguments of the capture. Python of ours that runs in ``forward_decode`` is not run.
    """

    CAPTURED_BATCH = 3

    def capture(self) -> None:
        """As upstream's decode graph runner does, before any request: padded, with request slot 0."""
        batch = self.CAPTURED_BATCH
        self._q = torch.zeros(len(self.layers), batch, HEADS * HEAD_DIM, dtype=self.dtype)
        self._kv = torch.zeros(2, len(self.layers), batch, KV_HEADS, HEAD_DIM, dtype=self.dtype)
        self._static = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=batch,
            input_ids=torch.zeros(batch, dtype=torch.int64),
            req_pool_indices=torch.zeros(batch, dtype=torch.int64),
            seq_lens=torch.ones(batch, dtype=torch.int64),
            seq_lens_sum=batch,
            out_cache_loc=torch.zeros(batch, dtype=torch.int64),
        )
        self._launches = {backend: self._captured(backend) for backend in (self.backend, self.stock)}
        self._eager = self.run_model
        self.run_model = self._replay

    def _captured(self, backend: TritonAttnBackend) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
        backend.init_cuda_graph_state(self.CAPTURED_BATCH, self.CAPTURED_BATCH)
        backend.init_forward_metadata_out_graph(self._static, in_capture=True)
        launches, launch = [], backend.decode_attention_fwd

        def recorded(*args: Any, **kwargs: Any) -> None:
            launches.append((launch, args, kwargs))
            launch(*args, **kwargs)

        backend.decode_attention_fwd = recorded
        for layer, q, k, v in zip(self.layers, self._q, *self._kv, strict=True):
            backend.forward_decode(q, k, v, layer, self._static)
        backend.decode_attention_fwd = launch
        return launches

    def _replay(self, batch: ForwardBatch) -> SimpleNamespace:
        if batch.forward_mode != ForwardMode.DECODE:
            return self._eager(batch)
        count = batch.batch_size
        static = self._static
        static.req_pool_indices.zero_()[:count] = batch.req_pool_indices
        static.seq_lens.fill_(1)[:count] = batch.seq_lens
        self._q.copy_(3 * torch.randn(self._q.shape, generator=self.random))
        self._kv.copy_(torch.randn(self._kv.shape, generator=self.random))
        outputs = []
        for backend, launches in self._launches.items():
            backend.init_forward_metadata_out_graph(static)
            for layer, k, v, (launch, args, kwargs) in zip(self.layers, *self._kv, launches, strict=True):
                pool = self.runner.token_to_kv_pool
                pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k[:count], v[:count])
                args[3].fill_(float("nan"))
                launch(*args, **kwargs)
            outputs.append([args[3][:count].clone() for _, args, _ in launches])
        assert all(map(torch.equal, *outputs)), "the emitting backend changed an output"
        for layer in range(len(self.layers)):
            q = self._q[layer, :count].view(-1, HEADS, HEAD_DIM)
            self._remember(self._chunks, layer, q, self._kv[0, layer, :count])
        return SimpleNamespace(can_run_graph=True)

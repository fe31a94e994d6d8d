"""sglang's own reading of a config.json, its arithmetic and its pools, on the CPU and without weights."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_importance import cpu

cpu.activate()  # ahead of what sglang imports

import torch  # noqa: E402
from sglang.srt.configs.model_config import AttentionArch, ModelConfig  # noqa: E402
from sglang.srt.distributed.utils import get_pp_indices  # noqa: E402
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator, _PoolSizes  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MambaPool  # noqa: E402
from sglang.srt.model_executor.model_runner_components.layer_setup import resolve_layer_indices  # noqa: E402
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (  # noqa: E402
    SpecAuxHiddenStateConfig,
)
from sglang.srt.model_executor.pool_configurator import (  # noqa: E402
    MemoryPoolConfigurator,
    create_memory_pool_configurator,
)
from sglang.srt.runtime_context import get_context, get_parallel, get_schedule  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402
from transformers import AutoConfig, PretrainedConfig  # noqa: E402

CLASSES_BESIDE_WEIGHTS = ("baichuan", "deepseek", "internlm2", "mimo", "mimo_v2_flash")
"""Types whose class comes with the weights."""


def _register(name: str) -> None:
    """A class that has the values of the file and none of its own."""
    AutoConfig.register(name, type(name, (PretrainedConfig,), {"model_type": name}))


for _name in CLASSES_BESIDE_WEIGHTS:
    _register(_name)

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "mxfp8": torch.float8_e4m3fn,
    "nvfp4": torch.float4_e2m1fn_x2,
    "fp4_mx_block16": torch.float4_e2m1fn_x2,
}


class UpstreamPools:
    """One GPU of one stage of a deployment, as sglang would set it up."""

    def __init__(
        self,
        config: Mapping[str, Any],
        folder: Path,
        *,
        dtype: str = "bfloat16",
        pp: int = 1,
        stage: int = 0,
        page_size: int = 1,
        draft_layers: int = 0,
        sliding_window_size: int | None = None,
    ) -> None:
        """
        Args:
            config: of the model, written below ``folder``.
            sliding_window_size: what the model itself would answer; none is loaded here.
        """
        # Configs are cached by their path.
        folder = Path(tempfile.mkdtemp(dir=folder))
        (folder / "config.json").write_text(json.dumps(config))
        self.model_config = ModelConfig(model_path=str(folder), dtype="bfloat16", trust_remote_code=False)
        start, end = get_pp_indices(self.model_config.num_hidden_layers, stage, pp)
        # Models that know no stages do not say where theirs begins and ends.
        layers = {"start_layer": start, "end_layer": end} if pp > 1 else {}
        self.configurator = KVCacheConfigurator(
            device="cpu",
            gpu_id=0,
            attn_dp_size=1,
            pp_size=pp,
            pp_group=None,
            model=SimpleNamespace(layers=()),  # asked for calibrated scales only
            model_config=self.model_config,
            server_args=get_context().server_args,
            kv_cache_dtype=TORCH_DTYPES[dtype],
            model_dtype=torch.bfloat16,
            page_size=page_size,
            sliding_window_size=sliding_window_size,
            spec_algorithm=SpeculativeAlgorithm.EAGLE if draft_layers else SpeculativeAlgorithm.NONE,
            is_draft_worker=False,
            post_capture_kv_active=False,
            spec_aux_config=SpecAuxHiddenStateConfig(eagle_draft_num_layers=draft_layers or None),
            is_hybrid_swa=self.model_config.is_hybrid_swa,
            is_hybrid_swa_compress=self.model_config.is_hybrid_swa_compress,
            use_mla_backend=self.model_config.attention_arch == AttentionArch.MLA,
            layer_info=resolve_layer_indices(
                model=SimpleNamespace(**layers),
                model_config=self.model_config,
                is_draft_worker=False,
            ),
            forward_stream=None,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=None,
            memory_pool_config=None,
            kv_cache_dtype_str=dtype,
        )

    @property
    def arithmetic(self) -> MemoryPoolConfigurator:
        return create_memory_pool_configurator(self.configurator)

    @property
    def state_params(self) -> Any:
        """Shapes of states; None where the model has none."""
        mambaish = self.configurator.mambaish_config
        return mambaish.mamba2_cache_params if mambaish is not None else None

    @property
    def max_states(self) -> int:
        """Slots of states, once sglang has divided its memory."""
        return int(get_schedule().max_mamba_cache_size)

    def allocated(self, full: int, window: int = 0, states: int = 0) -> Counter[str]:
        """Bytes by kind of tensor of the pools that sglang builds for so many tokens and states."""
        found: Counter[str] = Counter()
        state_pool = self._state_pool(states) if self.state_params is not None else None
        if state_pool is not None:
            found["conv"] = sum(map(_bytes, state_pool.mamba_cache.conv))
            found["ssm"] = _bytes(state_pool.mamba_cache.temporal)
        requests = SimpleNamespace(req_to_token=torch.zeros(2, 1), mamba_pool=state_pool)
        sizes = _PoolSizes(
            max_total_num_tokens=full,
            max_running_requests=1,
            full_max_total_num_tokens=full,
            swa_max_total_num_tokens=window,
            c4_max_total_num_tokens=0,
            c128_max_total_num_tokens=0,
            c4_state_pool_size=0,
            c128_state_pool_size=0,
            c4_state_dtype=None,
            c128_state_dtype=None,
        )
        pool = self.configurator._build_token_to_kv_pool(
            sizes=sizes,
            is_dsa_model=getattr(self.model_config, "index_head_dim", None) is not None,
            is_dsv4_model=False,
            req_to_token_pool=requests,
        )
        for part in (getattr(pool, "full_kv_pool", pool), getattr(pool, "swa_kv_pool", None)):
            for name, kind in _TENSORS.items():
                for tensor in getattr(getattr(part, "main_pool", part), name, None) or ():
                    found[kind] += _bytes(tensor)
        for name in ("index_kv_pool", "index_k_pool"):
            for kind in ("k_buffer", "v_buffer"):
                found["index"] += sum(map(_bytes, getattr(getattr(pool, name, None), kind, None) or ()))
        return +found

    def _state_pool(self, states: int) -> MambaPool:
        info = self.configurator.layer_info
        layers = [i for i in self.state_params.layers if info.start_layer <= i < info.end_layer]
        return MambaPool(
            size=states,
            spec_state_size=0,
            cache_params=self.state_params,
            mamba_layer_ids=layers,
            device="cpu",
        )


def dtype_of(config: Mapping[str, Any], folder: Path) -> torch.dtype:
    """That sglang serves a config in where nobody asks for one."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig(model_path=str(folder), trust_remote_code=False).dtype


_TENSORS = {
    "k_buffer": "k",
    "v_buffer": "v",
    "k_scale_buffer": "k_scale",
    "v_scale_buffer": "v_scale",
    "native_k_scale_buffer": "k_scale",
    "native_v_scale_buffer": "v_scale",
    "kv_buffer": "latent",
    "kv_scale_buffer": "latent_scale",
    "index_k_with_scale_buffer": "index",
}


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextmanager
def served_with(*, attention_tp: int = 1, page_size: int = 1, **options: Any) -> Iterator[None]:
    """sglang's process-wide configuration, for as long as the block runs.

    NVFP4 keeps one layout of scales where both phases read it natively.
    """
    backends = {"prefill_attention_backend": "trtllm_mha", "decode_attention_backend": "trtllm_mha"}
    with (
        get_context().override_server_args(page_size=page_size, **backends, **options),
        get_parallel().override(
            tp_size=attention_tp, moe_tp_size=attention_tp, attn_tp_size=attention_tp, attn_dcp_size=1
        ),
    ):
        yield

"""Which loaded models are refused, and which parts of ours beside others, in one line that names the cure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.lfm2 import Lfm2Config
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.configs.qwen3_5 import Qwen3_5Config, Qwen3_5MoeConfig
from sglang.srt.configs.qwen3_next import Qwen3NextConfig
from sglang.srt.layers.radix_attention import RadixAttention
from transformers import LlamaConfig

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.tiered_options import TieredOptions
from sglang_importance.attention.score_sources import UNPROVEN
from sglang_importance.launch.modes.loaded_model import config_refusals, model_refusals

IMPORTANCE = ImportanceOptions(policy="importance")
OBSERVE = ImportanceOptions(policy="observe")


def _attention_layer(*, temperature_len: int, **attention: Any) -> torch.nn.Module:
    layer = RadixAttention(1, 8, 1.0, num_kv_heads=1, layer_id=0, **attention)
    layer.xai_temperature_len = temperature_len  # as Grok's model does
    return layer


def _context(
    *,
    sliding_window: int = -1,
    logit_cap: float = 0.0,
    temperature_len: int = -1,
    kv_dtype: torch.dtype = torch.bfloat16,
    **changes: Any,
) -> Any:
    config = {
        "attention_arch": AttentionArch.MHA,
        "is_encoder_decoder": False,
        "is_multimodal": False,
        "is_generation": True,
        "linear_attn_registry_result": None,
        "hf_config": Lfm2Config(),
        "is_hybrid_swa": changes.get("is_hybrid_swa", False),
    }
    context = {"is_hybrid_swa": False, "is_hybrid_ssm": False, "is_dsa": False, "full_tokens_per_layer": None}
    config.update({name: changes.pop(name) for name in list(changes) if name in {*config} - {*context}})
    layer = _attention_layer(
        sliding_window_size=sliding_window, logit_cap=logit_cap, temperature_len=temperature_len
    )
    model = torch.nn.ModuleList([layer])
    arguments = {"speculative_algorithm": None, "disaggregation_mode": "null", "device": "cpu"}
    arguments.update({name: changes.pop(name) for name in list(changes) if name in arguments})
    return SimpleNamespace(
        server_args=SimpleNamespace(**arguments),
        **{**context, **changes},
        model_config=SimpleNamespace(**config),
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model, kv_cache_dtype=kv_dtype)),
    )


LATENT = {"attention_arch": AttentionArch.MLA}
ONE_POOL = {"sliding_window": 1023}
TWO_POOLS = {"sliding_window": 127, "is_hybrid_swa": True, "full_tokens_per_layer": 4096}
LINEAR = {"is_hybrid_ssm": True, "hf_config": Qwen3NextConfig()}
CAPPED = {"logit_cap": 30.0}
TEMPERED = {"temperature_len": 1024}


@pytest.mark.parametrize("changes", [{}, LATENT, ONE_POOL, TWO_POOLS, LINEAR, CAPPED])
@pytest.mark.parametrize("source", ["auto", "none", "torch_native"])
def test_text_models_of_every_tested_kind_are_allowed(changes: dict[str, Any], source: str) -> None:
    options = ImportanceOptions(policy="importance", source=source)
    assert model_refusals(_context(**changes), options) == []


@pytest.mark.parametrize(
    ("changes", "model"),
    [
        (LATENT, "multi-head latent attention"),
        (ONE_POOL, "sliding-window layers"),
        (LINEAR, "linear attention"),
    ],
)
def test_parts_that_want_one_pool_of_keys_and_values_are_refused(changes: dict[str, Any], model: str) -> None:
    (line,) = model_refusals(
        _context(**changes), ImportanceOptions(policy="importance", tiered=TieredOptions(residency="tiered"))
    )
    assert line == f"--kv-residency tiered does not support {model}: use --kv-residency full"
    for source in UNPROVEN:
        (line,) = model_refusals(_context(**changes), ImportanceOptions(policy="observe", source=source))
        assert f"--kv-importance-source {source} with {model}: use --kv-importance-source none" in line


@pytest.mark.parametrize(
    ("changes", "model"),
    [
        (LATENT, "multi-head latent attention"),
        (ONE_POOL, "sliding-window layers"),
        (LINEAR, "linear attention"),
    ],
)
def test_drafts_over_other_kv_are_refused_on_a_cpu(changes: dict[str, Any], model: str) -> None:
    context = _context(**changes, speculative_algorithm="NGRAM")
    (line,) = model_refusals(context, IMPORTANCE)
    assert f"--speculative-algorithm NGRAM with {model} on a CPU: drop --speculative-algorithm" in line
    context.server_args.device = "cuda"
    assert model_refusals(context, IMPORTANCE) == []


@pytest.mark.parametrize("changes", [CAPPED, TEMPERED])
def test_tiered_attention_to_changed_logits_is_refused(changes: dict[str, Any]) -> None:
    tiered = ImportanceOptions(policy="importance", tiered=TieredOptions(residency="tiered"))
    (line,) = model_refusals(_context(**changes), tiered)
    assert line == (
        "--kv-residency tiered does not support logits with a soft cap or a temperature by length: "
        "use --kv-residency full"
    )
    assert model_refusals(_context(), tiered) == []


@pytest.mark.parametrize("config", [Qwen3_5Config, Qwen3_5MoeConfig])
def test_qwen3_5_is_a_gated_delta_net_and_its_pictures_are_refused(config: type) -> None:
    text = {"is_hybrid_ssm": True, "hf_config": config()}
    assert model_refusals(_context(**text), IMPORTANCE) == []
    (line,) = model_refusals(_context(**text, is_multimodal=True), IMPORTANCE)
    assert line.startswith("--kv-policy importance does not support multimodal models: serve a text model")


def test_states_are_not_handed_from_server_to_server() -> None:
    (line,) = model_refusals(_context(**LINEAR, disaggregation_mode="prefill"), OBSERVE)
    assert "--disaggregation-mode prefill with linear attention: drop --disaggregation-mode" in line


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        (
            {"is_hybrid_swa": True, "full_tokens_per_layer": 0},
            "models whose layers all have a sliding window",
        ),
        ({"is_hybrid_ssm": True}, "state-space models, and linear attention but gated delta nets"),
        ({"is_dsa": True}, "sparse-attention models"),
        ({"attention_arch": AttentionArch.SSM}, "SSM attention"),
        ({"is_encoder_decoder": True}, "encoder-decoder models"),
        ({"is_multimodal": True}, "multimodal models"),
        ({"is_generation": False}, "embedding and reward models"),
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], mode: str) -> None:
    (line,) = model_refusals(_context(**changes), IMPORTANCE)
    assert line.startswith(f"--kv-policy importance does not support {mode}: serve a text model")


def test_a_checkpoint_may_quantize_the_cache_itself() -> None:
    context = _context(kv_dtype=torch.float8_e4m3fn)
    assert model_refusals(context, IMPORTANCE) == []
    (line,) = model_refusals(context, ImportanceOptions(policy="importance", source="triton"))
    assert "--kv-importance-source triton with a checkpoint's quantized KV cache: use" in line


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder models"),
        ({"is_multimodal": True}, "multimodal models"),
        ({"is_generation": False}, "embedding and reward models"),
    ],
)
def test_the_config_alone_refuses_before_weights_are_loaded(changes: dict[str, Any], kind: str) -> None:
    config = _context(**{"hf_config": LlamaConfig(), **changes}).model_config
    (line,) = config_refusals(config, IMPORTANCE)
    assert kind in line
    plain = _context(hf_config=LlamaConfig()).model_config
    assert config_refusals(plain, IMPORTANCE) == []


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        (LATENT, "multi-head latent attention"),
        ({"is_hybrid_swa": True}, "sliding-window layers"),
        ({"hf_config": Qwen3NextConfig()}, "linear attention"),
    ],
)
def test_no_pool_of_pages_is_begun_for_other_kv(changes: dict[str, Any], kind: str) -> None:
    config = _context(**{"hf_config": LlamaConfig(), **changes}).model_config
    tiered = ImportanceOptions(policy="importance", tiered=TieredOptions(residency="tiered"))
    assert config_refusals(config, tiered) == [
        f"--kv-residency tiered does not support {kind}: use --kv-residency full"
    ]
    (line,) = config_refusals(config, ImportanceOptions(policy="observe", source="qk_probe"))
    assert f"--kv-importance-source qk_probe with {kind}: use --kv-importance-source none" in line
    assert config_refusals(config, IMPORTANCE) == []

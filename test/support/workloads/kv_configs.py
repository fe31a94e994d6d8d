"""Tiny configs of every architecture whose cache is sized: real names, real relations, small numbers."""

from __future__ import annotations

import copy
from typing import Any

from sgl_importance_lab.kv_size.cache_dtype import cache_dtype
from sgl_importance_lab.kv_size.deployment import Deployment
from sgl_importance_lab.kv_size.families import FAMILIES

Config = dict[str, Any]

_HEADS: Config = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "vocab_size": 128,
    "torch_dtype": "bfloat16",
}
_DERIVED: Config = {name: value for name, value in _HEADS.items() if name != "head_dim"}
"""As configs that leave the width of a head to the hidden size."""
_GPT_2: Config = {"n_head": 8, "n_embd": 256, "n_layer": 3, "n_positions": 512}
_WINDOWS = ["sliding_attention", "full_attention"] * 2
_MASKED: Config = {"layer_types": _WINDOWS, "sliding_window": 64}
_LATENT: Config = _HEADS | {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": 256,
    "n_routed_experts": 4,
}
_SPARSE: Config = _LATENT | {"index_topk": 64, "index_head_dim": 128, "index_n_heads": 4}
_GATED_DELTA: Config = _HEADS | {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
_MAMBA: Config = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_MAMBA_1: Config = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "expand": 2,
    "state_size": 16,
    "conv_kernel": 4,
    "vocab_size": 128,
}
_GEMMA_3N: Config = _HEADS | {
    "num_hidden_layers": 8,
    "layer_types": _WINDOWS * 2,
    "sliding_window": 64,
    "num_kv_shared_layers": 4,
    "intermediate_size": [128] * 8,
    "activation_sparsity_pattern": [0.0] * 8,
}
_GEMMA_4: Config = _HEADS | {
    "num_hidden_layers": 8,
    "layer_types": _WINDOWS * 2,
    "sliding_window": 64,
    "global_head_dim": 128,
    "num_global_key_value_heads": 2,
    "num_kv_shared_layers": 2,
}


def _inside(model_type: str, config: Config) -> Config:
    return {"text_config": config | {"model_type": model_type}}


_ALL: dict[str, Config] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen3", "qwen3_moe", "gemma", "glm4", "glm4_moe", "minimax_m2"), _HEADS
    ),
    **dict.fromkeys(("ministral3", "ernie4_5", "hy_v3", "arcee", "mimo"), _HEADS),
    **dict.fromkeys(("mixtral", "qwen2", "qwen2_moe", "phi3", "olmo", "olmo2", "olmoe", "granite"), _DERIVED),
    **dict.fromkeys(
        ("starcoder2", "cohere", "apertus", "granitemoe", "granitemoeshared", "exaone"), _DERIVED
    ),
    **dict.fromkeys(("phi", "persimmon", "opt", "baichuan", "internlm2", "deepseek", "stablelm"), _DERIVED),
    **dict.fromkeys(("phimoe", "ernie4_5_moe"), _DERIVED),
    **dict.fromkeys(("gpt2", "gptj"), _GPT_2),
    "chatglm": {
        "num_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "multi_query_attention": True,
        "multi_query_group_num": 4,
        "seq_length": 512,
    },
    "dbrx": {
        "n_layers": 4,
        "d_model": 256,
        "n_heads": 8,
        "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 4},
        "torch_dtype": "bfloat16",
    },
    "llava": _inside("llama", _DERIVED),
    "mistral3": _inside("mistral", _HEADS),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _DERIVED),
    "qwen3_vl": _inside("qwen3_vl_text", _HEADS),
    "qwen3_omni_moe": {"thinker_config": _inside("qwen3_omni_moe_text", _HEADS)},
    "internvl_chat": {"llm_config": _HEADS | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}},
    "qwen3_vl_moe": _inside("qwen3_vl_moe_text", _HEADS),
    "glm4v": _inside("glm4v_text", _DERIVED),
    "glm4v_moe": _inside("glm4v_moe_text", _DERIVED),
    "gpt_bigcode": _GPT_2 | {"multi_query": True},
    **dict.fromkeys(("gemma2", "gemma3_text", "cohere2"), _HEADS | _MASKED),
    **dict.fromkeys(("olmo3", "exaone4", "exaone_moe"), _DERIVED | _MASKED),
    "afmoe": _HEADS | _MASKED,
    "cohere2_vision": _inside("cohere2", _HEADS | _MASKED),
    **dict.fromkeys(
        ("hunyuan_v1_dense", "hunyuan_v1_moe"), _HEADS | {"use_cla": True, "cla_share_factor": 2}
    ),
    "gemma3": _inside("gemma3_text", _HEADS | _MASKED),
    "gemma3n_text": _GEMMA_3N,
    "gemma3n": _inside("gemma3n_text", _GEMMA_3N),
    **dict.fromkeys(("gpt_oss", "mellum"), _HEADS | _MASKED),
    "step3p5": {name: value for name, value in _HEADS.items() if name != "num_key_value_heads"}
    | {
        "max_seq_len": 512,
        "layer_types": [*_WINDOWS, "sliding_attention"],  # the last is a draft's
        "sliding_window": 63,
        "num_attention_groups": 4,
        "attention_other_setting": {"num_attention_heads": 16, "num_attention_groups": 4, "head_dim": 64},
    },
    "llama4": _inside("llama4_text", _HEADS | {"num_hidden_layers": 8, "attention_chunk_size": 64}),
    "gemma4": _inside("gemma4_text", _GEMMA_4),
    "gemma4_unified": _inside("gemma4_unified_text", _GEMMA_4),
    "mimo_v2_flash": _HEADS
    | {
        "head_dim": 192,
        "v_head_dim": 128,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
        "swa_num_key_value_heads": 8,
        "swa_num_attention_heads": 8,
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "sliding_window_size": 63,
    },
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), _LATENT),
    "kimi_k25": _inside("deepseek_v3", _LATENT),
    "kimi_vl": _inside("deepseek_v3", _LATENT),
    "minimax_m3_vl": _inside(
        "minimax_m2",
        _HEADS
        | {
            "sparse_attention_config": {
                "sparse_attention_freq": [0, 1, 1, 1],
                "sparse_disable_index_value": [0, 0, 1, 1],
                "sparse_index_dim": 128,
            }
        },
    ),
    "longcat_flash": _LATENT,
    "deepseek_v32": _SPARSE,
    "glm_moe_dsa": _SPARSE | {"indexer_types": ["full", "shared", "full", "shared"]},
    "qwen3_next": _GATED_DELTA,
    "qwen3_5": _inside("qwen3_5_text", _GATED_DELTA),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _GATED_DELTA),
    "qwen3_5_moe": _inside("qwen3_5_moe_text", _GATED_DELTA),
    "kimi_linear": _LATENT
    | {
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "num_heads": 8,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        }
    },
    "falcon_h1": _HEADS | _MAMBA | {"mamba_d_ssm": 128, "mamba_d_head": 16},
    "granitemoehybrid": _HEADS | _MAMBA | {"mamba_d_head": 64, "layer_types": ["mamba", "attention"] * 2},
    "nemotron_h": _HEADS
    | {
        "hybrid_override_pattern": "M-*E",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 32,
        "n_groups": 2,
        "conv_kernel": 4,
        "mamba_ssm_dtype": "bfloat16",
    },
    **dict.fromkeys(
        ("lfm2", "lfm2_moe"),
        _DERIVED | {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3},
    ),
    "mamba2": {
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 32,
        "n_groups": 2,
        "conv_kernel": 4,
        "expand": 2,
        "vocab_size": 128,
    },
    **dict.fromkeys(("mamba", "falcon_mamba"), _MAMBA_1),
}

WINDOW = 63
"""Tokens that the windows of all of them reach back."""


def tiny_config(model_type: str, **changes: Any) -> Config:
    """One of them with some values changed, in the text model's part where it has one."""
    config = copy.deepcopy(_ALL[model_type]) | {
        "model_type": model_type,
        "architectures": [FAMILIES[model_type].architecture],
    }
    text_of(config).update(changes)
    return config


def text_of(config: Config) -> Config:
    """The part of a config that describes the text model: all of it where it has no such part."""
    family = FAMILIES[config["model_type"]]
    outer = config if family.within is None else config[family.within]
    part: Config = outer.get(family.nested, config)
    return part


def has_text_apart(config: Config) -> bool:
    """Whether the text model has a part of its own."""
    return text_of(config) is not config


def page_size_of(model_type: str) -> int:
    """Sparse attention has pages of one size."""
    return 64 if model_type in ("deepseek_v32", "glm_moe_dsa") else 16


def deployment_of(model_type: str, **settings: Any) -> Deployment:
    """On one GPU, in bf16 and pages of the size that the model takes, where ``settings`` say nothing else."""
    settings = {"page_size": page_size_of(model_type), "dtype": "bfloat16"} | settings
    return Deployment(**settings | {"dtype": cache_dtype(settings["dtype"])})

"""Families of models: tiny ones of random weights, in the shape of the real architectures."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY = 1000
WINDOW = 32
"""Tokens of a sliding window, two pages of 16: prompts are several times as long."""

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOWED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "rope_parameters": YARN,
    **EXPERTS,
}


@dataclass(frozen=True)
class Family:
    """A model architecture, and what its server needs on a CPU.

    Attributes:
        name: as its makers write it.
        model_type: of its configuration, as transformers names it.
        shape: of the tiny model, beside ``COMMON``.
        attention: how its layers attend, in a few words.
        flags: of its server.
        second_pool: whether its tree holds more than KV: sliding windows in a pool of their own, or states.
        states: whether its tree holds states of linear attention, each at the end of a request.
    """

    name: str
    model_type: str
    shape: dict[str, Any] = field(default_factory=dict)
    attention: str = "grouped-query"
    flags: tuple[str, ...] = ("--attention-backend", "torch_native")
    second_pool: bool = False
    states: bool = False


FAMILIES: tuple[Family, ...] = (
    Family("Llama", "llama"),
    Family("Mistral", "mistral", {"sliding_window": None}),
    Family("Qwen2", "qwen2"),
    Family("Qwen3", "qwen3"),
    Family("Qwen3-MoE", "qwen3_moe", {"num_experts": 4, **EXPERTS}),
    Family(
        "Gemma-2",
        "gemma2",
        {**WINDOWED, "query_pre_attn_scalar": 16, "hidden_act": "gelu_pytorch_tanh"},
        attention="sliding windows in every other layer, one pool",
    ),
    Family(
        "Gemma-3",
        "gemma3_text",
        {**WINDOWED, "query_pre_attn_scalar": 16},
        attention="sliding windows in most layers, one pool",
    ),
    Family(
        "DeepSeek-V2",
        "deepseek_v2",
        {**LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy", "scoring_func": "softmax"},
        attention="multi-head latent (MLA)",
    ),
    Family(
        "DeepSeek-V3",
        "deepseek_v3",
        {**LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        attention="multi-head latent (MLA)",
    ),
    Family(
        "gpt-oss",
        "gpt_oss",
        {
            **WINDOWED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "swiglu_limit": 7.0,
            "rope_parameters": YARN,
        },
        attention="sliding windows in every other layer, a pool of their own; learnt sinks",
        # Upstream refuses torch_native for this model, and falls back to it where there is no AMX.
        flags=("--attention-backend", "intel_amx", "--swa-full-tokens-ratio", "0.6"),
        second_pool=True,
    ),
    Family(
        "Qwen3-Next",
        "qwen3_next",
        {
            "num_hidden_layers": 4,
            "full_attention_interval": 2,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
            **EXPERTS,
        },
        attention="gated delta nets in every other layer, a pool of their states",
        # States are few, so that room for them is made too.
        flags=("--attention-backend", "torch_native", "--page-size", "1", "--max-mamba-cache-size", "12"),
        second_pool=True,
        states=True,
    ),
)


def write_random_model(folder: Path, family: Family, seed: int = 0) -> Path:
    """A checkpoint without tokenizer, its next token hanging on every token that it sees."""
    import sglang  # noqa: F401  # first: with it come the shims, and transformers needs one of them
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family.model_type, **{**COMMON, **family.shape})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # of weight beside some hundred tokens
            torch.nn.init.normal_(parameter, mean=3.0)
    model.save_pretrained(folder)
    return folder

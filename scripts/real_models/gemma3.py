"""Gemma 3, text alone: a GGUF file as transformers' ``Gemma3ForCausalLM`` has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from real_models.gguf_file import GgufFile

LAYERS_FROM_FULL_TO_FULL = 6
"""Five layers look back over a window, the sixth over everything; GGUF leaves it to the architecture."""
THETA_IN_WINDOWS = 10_000.0
"""Base of the rotary embeddings of layers with a window; likewise."""

_OF_THE_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def gemma3_config(file: GgufFile) -> dict[str, Any]:
    """The content of config.json, readable by transformers 4 and 5."""
    layers = file.of_architecture("block_count")
    head_size = file.of_architecture("attention.key_length")
    theta = file.of_architecture("rope.freq_base")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": len(file.metadata("tokenizer.ggml.tokens")),
        "hidden_size": file.of_architecture("embedding_length"),
        "intermediate_size": file.of_architecture("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": file.of_architecture("attention.head_count"),
        "num_key_value_heads": file.of_architecture("attention.head_count_kv"),
        "head_dim": head_size,
        "query_pre_attn_scalar": head_size,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "rms_norm_eps": file.of_architecture("attention.layer_norm_rms_epsilon"),
        "sliding_window": file.of_architecture("attention.sliding_window"),
        "sliding_window_pattern": LAYERS_FROM_FULL_TO_FULL,
        "layer_types": [
            "sliding_attention" if (layer + 1) % LAYERS_FROM_FULL_TO_FULL else "full_attention"
            for layer in range(layers)
        ],
        "rope_theta": theta,
        "rope_local_base_freq": THETA_IN_WINDOWS,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": THETA_IN_WINDOWS},
        },
        "max_position_embeddings": file.of_architecture("context_length"),
        "tie_word_embeddings": "output.weight" not in file,
    }


def gemma3_tensors(file: GgufFile) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Name in the checkpoint and values of each tensor.

    Norms multiply by one more than the checkpoint holds; GGUF has the sum. Queries and keys are in the same
    order in both.
    """
    for name in file.names():
        values = file.tensor(name)
        if name.endswith("norm.weight"):
            values -= 1.0
        if name in _OF_THE_MODEL:
            yield _OF_THE_MODEL[name], values
        elif name.startswith("blk."):
            _, layer, part, _ = name.split(".")
            yield f"model.layers.{layer}.{_OF_A_LAYER[part]}.weight", values

"""Llama: a GGUF file's metadata and tensors as transformers' ``LlamaForCausalLM`` has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from real_models.gguf_file import GgufFile

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
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def llama_config(file: GgufFile) -> dict[str, Any]:
    """The content of config.json, readable by transformers 4 and 5."""
    heads = file.of_architecture("attention.head_count")
    width = file.of_architecture("embedding_length")
    theta = file.of_architecture("rope.freq_base")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(file.metadata("tokenizer.ggml.tokens")),
        "hidden_size": width,
        "intermediate_size": file.of_architecture("feed_forward_length"),
        "num_hidden_layers": file.of_architecture("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.of_architecture("attention.head_count_kv"),
        "head_dim": width // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": file.of_architecture("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "max_position_embeddings": file.of_architecture("context_length"),
        "tie_word_embeddings": "output.weight" not in file,
    }


def llama_tensors(file: GgufFile) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Name in the checkpoint and values of each tensor."""
    heads = {
        "attn_q": file.of_architecture("attention.head_count"),
        "attn_k": file.of_architecture("attention.head_count_kv"),
    }
    for name in file.names():
        if name in _OF_THE_MODEL:
            yield _OF_THE_MODEL[name], file.tensor(name)
        elif name.startswith("blk."):
            _, layer, part, _ = name.split(".")
            values = file.tensor(name)
            if part in heads:
                values = halves_apart(values, heads[part])
            yield f"model.layers.{layer}.{_OF_A_LAYER[part]}.weight", values


def halves_apart(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undoes the order that llama.cpp gives the rows of queries and keys, [heads * head size, inputs].

    Rotary embeddings turn pairs of channels: GGUF has the two of a pair side by side, transformers has the
    first of all pairs in one half of the head and the second in the other (llama.cpp: ``LlamaModel.permute``
    of convert_hf_to_gguf.py).
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))

"""Models made for a test: of random weights, or none."""

from __future__ import annotations

import json
from pathlib import Path

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_tiny_llama(folder: Path) -> Path:
    """A configuration only, for ``--load-format dummy``."""
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    return folder


def write_random_llama(folder: Path, seed: int = 0) -> Path:
    """A small Llama with random weights.

    A better detector of damage than a trained model: its next token hangs on every token of the context, and
    no margin that training widened hides a damaged page.
    """
    import sglang  # noqa: F401  # first: with it come the shims, and transformers needs one of them
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.15,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder

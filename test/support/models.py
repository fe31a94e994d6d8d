"""Models made for a test: of random weights, or none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


SMALL_LLAMA = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
}


def write_tiny_llama(folder: Path) -> Path:
    """A configuration only, for ``--load-format dummy``."""
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    return folder


def write_random_llama(
    folder: Path,
    seed: int = 0,
    *,
    tokenizer_of: Path | None = None,
    shape: Mapping[str, Any] = SMALL_LLAMA,
) -> Path:
    """A small Llama with random weights.

    A better detector of damage than a trained model: its next token hangs on every token of the context, and
    no margin that training widened hides a damaged page.

    Args:
        folder: to write to.
        seed: of the weights.
        tokenizer_of: checkpoint whose tokenizer and vocabulary the model gets; without it, it has none.
        shape: fields of its configuration.
    """
    import sglang  # noqa: F401  # first: with it come the shims, and transformers needs one of them
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab_size = 1000
    if tokenizer_of is not None:
        vocab_size = json.loads((tokenizer_of / "config.json").read_text())["vocab_size"]
        for file in tokenizer_of.glob("tokenizer*.json"):
            shutil.copy(file, folder)
    config = LlamaConfig(
        vocab_size=vocab_size,
        max_position_embeddings=8192,
        eos_token_id=None,
        bos_token_id=None,
        **shape,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_random_adapter(folder: Path, model: Path, seed: int) -> Path:
    """A LoRA adapter of random weights, strong enough to change what a random model says.

    Args:
        folder: to write to; made where it is missing.
        model: checkpoint of a Llama that it is for.
        seed: of the weights.
    """
    import torch
    from safetensors.torch import save_file

    shape = json.loads((model / "config.json").read_text())
    hidden, rank = shape["hidden_size"], 4
    values = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, out in (("q_proj", hidden), ("v_proj", values)):
            part = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{part}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator) * 0.1
            weights[f"{part}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * 0.1
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder

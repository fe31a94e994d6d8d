"""The probe's shape, as the config.json and generation_config.json of a LlamaForCausalLM checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_importance_lab.probe.tokenizer import BEGIN, END, PAD, token_ids, vocabulary_size

MAX_POSITIONS = 32768


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Llama decoder with an untied output head; `heads` query heads share `kv_heads` heads."""

    vocabulary: int
    layers: int = 4
    width: int = 192
    heads: int = 6
    kv_heads: int = 2
    head_size: int = 32
    hidden: int = 576
    rope_theta: float = 1e5
    norm_epsilon: float = 1e-5

    def to_llama(self) -> dict[str, Any]:
        """The content of config.json, readable by transformers 4 and 5."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "torch_dtype": "float32",
            "vocab_size": self.vocabulary,
            "num_hidden_layers": self.layers,
            "hidden_size": self.width,
            "intermediate_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": self.norm_epsilon,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "max_position_embeddings": MAX_POSITIONS,
            "tie_word_embeddings": False,
            "use_cache": True,
            "bos_token_id": token_ids()[BEGIN],
            "eos_token_id": token_ids()[END],
            "pad_token_id": token_ids()[PAD],
        }


def probe_config() -> ModelConfig:
    """The shape of the committed checkpoint."""
    return ModelConfig(vocabulary=vocabulary_size())


def write_config(directory: Path, config: ModelConfig) -> None:
    """Writes config.json and generation_config.json into `directory`.

    Generation keeps the one most likely token: a server that takes its sampling defaults from the model is
    then greedy for clients that set no temperature too.
    """
    ids = token_ids()
    generation = {
        "bos_token_id": ids[BEGIN],
        "eos_token_id": ids[END],
        "pad_token_id": ids[PAD],
        "do_sample": True,
        "top_k": 1,
    }
    for name, content in (("config.json", config.to_llama()), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

"""A parser of the real sglang with our flags, and a model so small that it needs no weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving import free_port

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


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny_llama")
    (directory / "config.json").write_text(json.dumps(TINY_LLAMA))
    return directory


@pytest.fixture(scope="session")
def plugin() -> None:
    """Loads the plugin as sglang's launcher does."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture
def parse(plugin: None) -> Callable[..., Any]:
    """ServerArgs from flags, as the launcher makes them."""
    from sglang.srt.server_args import ServerArgs

    def parse_flags(*flags: str) -> ServerArgs:
        parser = argparse.ArgumentParser(prog="sglang serve", usage="...")
        ServerArgs.add_cli_args(parser)
        args = parser.parse_args(["--model-path", "dummy", "--port", str(free_port()), *flags])
        args._radix_eviction_policy_explicitly_set = "--radix-eviction-policy" in flags
        return ServerArgs.from_cli_args(args)

    return parse_flags

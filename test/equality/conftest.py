"""The model whose tokens betray damage, and the answers of a server that reuses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from served import script_server
from workload import POOL_FLAGS, Exchange, record_exchanges


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small Llama with random weights.

    A better detector than a trained model: its next token hangs on every token of the context, and no
    margin that training widened hides a damaged page.
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
    folder = tmp_path_factory.mktemp("random-llama")
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def exchanges(random_model: Path) -> list[Exchange]:
    """Every prompt with the tokens that stock sglang answers without a radix cache."""
    with script_server(
        *("--kv-policy", "default", "--disable-radix-cache", *POOL_FLAGS, "--max-total-tokens", "16384"),
        model=random_model,
    ) as server:
        assert server.get("/server_info")["dtype"] == "float32"
        recorded = record_exchanges(server)
        assert all(server.generate(e.prompt)["meta_info"]["cached_tokens"] == 0 for e in recorded[:2])
    return recorded

"""The decoder's arithmetic beside transformers', for every architecture that it knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_importance_lab.trained_model.decoder import Decoder, Prefill
from sgl_importance_lab.trained_model.decoder_shape import Shape, UnknownModel
from sglang_importance import cpu

from support.models import TINY_LLAMA

WINDOW = 24
TINY_GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("config", [TINY_LLAMA, TINY_GEMMA], ids=lambda config: config["model_type"])
def test_log_probabilities_are_those_of_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    cpu.activate()  # torchvision lacks an operator on a CPU
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(tmp_path), attn_implementation="eager"
    ).float()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.1 * torch.randn_like(weight))  # norms as well, which begin at one value
        theirs.save_pretrained(tmp_path)
        tokens = torch.randint(512, (4 * WINDOW,))
        expected = theirs(tokens[None]).logits[0].log_softmax(dim=-1)
        decoder = Decoder(tmp_path)
        prefill = Prefill(decoder, tokens[:-1])

        def last_one(
            layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
        ) -> torch.Tensor:
            k, v = torch.cat([prefill.keys[layer], keys]), torch.cat([prefill.values[layer], values])
            seen = decoder.shape.sees(layer, torch.tensor([len(tokens) - 1]), len(tokens))
            parts = (part.transpose(0, 1)[None] for part in (queries, k, v))
            outputs = torch.nn.functional.scaled_dot_product_attention(
                *parts, attn_mask=seen, enable_gqa=True
            )
            return outputs[0].transpose(0, 1)

        hidden = decoder.hidden(tokens[-1:], torch.tensor([len(tokens) - 1]), last_one)
        found = decoder.log_probabilities(hidden)
    torch.testing.assert_close(found[0], expected[-1], rtol=1e-4, atol=1e-4)
    assert float(expected[-1].max()) > -5.0, "a distribution that could not tell one arithmetic from another"


def test_layers_with_a_window_are_told_from_those_that_see_everything(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_GEMMA))
    shape = Shape.of(tmp_path)
    assert shape.whole_layers == (1, 3)
    assert shape.thetas == (10_000.0, 1_000_000.0) * 2
    assert shape.sees(0, torch.tensor([30]), 40)[0].nonzero()[:, 0].tolist() == list(range(7, 31))
    assert shape.sees(1, torch.tensor([30]), 40)[0].nonzero()[:, 0].tolist() == list(range(31))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "qwen3"}, "model_type is 'qwen3', need 'llama' or 'gemma3_text'"),
        ({"query_pre_attn_scalar": 64}, "logits that are not scaled by their dimension"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 4 layers"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}},
            "scaled positions",
        ),
    ],
)
def test_what_is_not_computed_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_GEMMA | changed))
    with pytest.raises(UnknownModel, match=message):
        Shape.of(tmp_path)

"""A decoder of the Llama architecture in float32, whose attention the caller computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn import functional as F

from sgl_importance.json_text import BadJson, read_json

Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes a layer, queries [tokens, heads, dimension], keys and values [tokens, KV heads, dimension] of the new
tokens, all rotated; returns outputs [tokens, heads, dimension]."""

ROWS = 2048
"""Rows of the widest products at a time."""

_THETA = 10_000.0
"""Of the rotation, where a config names none."""

_OF_A_LAYER = (
    *("input_layernorm", "post_attention_layernorm"),
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
)
_COPY_AGAIN = "copy or download the model again"


class UnknownModel(ValueError):
    """The folder holds no model that this decoder computes; the message says why."""


@dataclass(frozen=True)
class Shape:
    """What of ``config.json`` the arithmetic needs."""

    layers: int
    heads: int
    kv_heads: int
    dim: int
    vocabulary: int
    context: int
    epsilon: float
    theta: float

    @classmethod
    def of(cls, folder: Path) -> Shape:
        """Reads a checkpoint's config.

        Raises:
            UnknownModel: another architecture, positions that are scaled, or no config of a model.
        """
        path = folder / "config.json"
        config = _config(path)
        if config.get("model_type") != "llama":
            raise UnknownModel(f"{folder}: model_type is {config.get('model_type')!r}, need 'llama'")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
            raise UnknownModel(f"{folder}: scaled positions ({rope}) are not computed here")
        try:
            heads = int(config["num_attention_heads"])
            return cls(
                layers=int(config["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                dim=int(config.get("head_dim") or config["hidden_size"] // heads),
                vocabulary=int(config["vocab_size"]),
                context=int(config["max_position_embeddings"]),
                epsilon=float(config["rms_norm_eps"]),
                theta=float(config.get("rope_theta") or rope.get("rope_theta") or _THETA),
            )
        except KeyError as error:
            raise UnknownModel(f"{path} lacks {error.args[0]}: {_COPY_AGAIN}") from error
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise UnknownModel(f"{path} is no config of a model ({error}): {_COPY_AGAIN}") from error


class Decoder:
    """Weights and arithmetic of one checkpoint.

    Args:
        folder: in Hugging Face's format: ``config.json`` and ``*.safetensors``.

    Raises:
        UnknownModel: see ``Shape.of``, or weights are missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.shape = Shape.of(folder)
        self._weights = {
            name.removeprefix("model."): weight.float()
            for part in sorted(folder.glob("*.safetensors"))
            for name, weight in _tensors(part).items()
        }
        if not self._weights:
            raise UnknownModel(f"{folder} has no *.safetensors")
        of_layers = [f"layers.{at}.{name}" for at in range(self.shape.layers) for name in _OF_A_LAYER]
        for name in ("embed_tokens", "norm", *of_layers):
            if f"{name}.weight" not in self._weights:
                raise UnknownModel(f"{folder}: no *.safetensors holds model.{name}.weight: {_COPY_AGAIN}")
        self._head = self._weights.get("lm_head.weight", self._weights["embed_tokens.weight"])
        exponents = torch.arange(0, self.shape.dim, 2, dtype=torch.float64) / self.shape.dim
        self._frequencies = self.shape.theta**-exponents

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """The normed output of the last layer, [tokens, width], for int64 [tokens] at int64 [tokens]."""
        shape = self.shape
        state = self._weights["embed_tokens.weight"][tokens]
        angles = positions[:, None].double() * self._frequencies
        cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
        for layer in range(shape.layers):
            weight = self._of(layer)
            normed = self._norm(state, weight("input_layernorm"))
            q, k, v = self.projected(layer, normed)
            outputs = attention(layer, _rotated(q, cos, sin), _rotated(k, cos, sin), v)
            state = state + F.linear(outputs.flatten(1), weight("self_attn.o_proj"))
            for rows in torch.arange(len(state)).split(ROWS):
                normed = self._norm(state[rows], weight("post_attention_layernorm"))
                gate = F.silu(F.linear(normed, weight("mlp.gate_proj")))
                up = F.linear(normed, weight("mlp.up_proj"))
                state[rows] += F.linear(gate * up, weight("mlp.down_proj"))
        return self._norm(state, self._weights["norm.weight"])

    def projected(self, layer: int, normed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values before rotation, out of a layer's normed input, [tokens, width]."""
        weight = self._of(layer)
        return tuple(
            F.linear(normed, weight(f"self_attn.{part}_proj")).unflatten(1, (-1, self.shape.dim))
            for part in "qkv"
        )

    def log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the next token, in nats, [tokens, vocabulary]."""
        return F.linear(hidden, self._head).log_softmax(dim=-1)

    def _of(self, layer: int) -> Callable[[str], torch.Tensor]:
        return lambda name: self._weights[f"layers.{layer}.{name}.weight"]

    def _norm(self, state: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(state, (state.shape[-1],), weight, self.shape.epsilon)


def _config(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise UnknownModel(f"{path.parent} has no config.json: give the folder of a Hugging Face checkpoint")
    try:
        config = read_json(path.read_bytes())
    except (OSError, BadJson) as error:
        raise UnknownModel(f"{path} cannot be read ({error}): {_COPY_AGAIN}") from error
    if not isinstance(config, dict):
        raise UnknownModel(f"{path} holds no JSON object: {_COPY_AGAIN}")
    return config


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UnknownModel(f"{file} cannot be read ({error}): {_COPY_AGAIN}") from error


def _rotated(vectors: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Prefill:
    """Keys and values of a text's tokens in every layer, computed with exact attention.

    Attributes:
        keys: float32 [layers, tokens, KV heads, dimension].
        values: likewise.
        queries: float32 [layers, tokens, heads, dimension], unscaled, where they were asked for.
    """

    def __init__(self, decoder: Decoder, tokens: torch.Tensor, *, keeps_queries: bool = False) -> None:
        shape = decoder.shape
        of_layer = (len(tokens), shape.kv_heads, shape.dim)
        self.keys, self.values = (torch.empty(shape.layers, *of_layer) for _ in range(2))
        self.queries = torch.empty(shape.layers if keeps_queries else 0, len(tokens), shape.heads, shape.dim)

        def attention(
            layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
        ) -> torch.Tensor:
            self.keys[layer], self.values[layer] = keys, values
            if keeps_queries:
                self.queries[layer] = queries
            q, k, v = (part.transpose(0, 1)[None] for part in (queries, keys, values))
            outputs = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return outputs[0].transpose(0, 1)

        decoder.hidden(tokens, torch.arange(len(tokens)), attention)

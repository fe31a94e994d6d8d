"""A decoder in float32, of an architecture in ``decoder_shape``, whose attention the caller computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn import functional as F

from sgl_importance_lab.trained_model.decoder_shape import COPY_AGAIN, Shape, UnknownModel

Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes a layer, queries [tokens, heads, dimension], keys and values [tokens, KV heads, dimension] of the new
tokens, all rotated; returns outputs [tokens, heads, dimension]."""

ROWS = 2048
"""Rows of the widest products at a time."""


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
        family = self.shape.family
        of_layers = [f"layers.{at}.{name}" for at in range(self.shape.layers) for name in family.of_a_layer]
        for name in ("embed_tokens", "norm", *of_layers):
            if f"{name}.weight" not in self._weights:
                raise UnknownModel(f"{folder}: no *.safetensors holds model.{name}.weight: {COPY_AGAIN}")
        self._head = self._weights.get("lm_head.weight", self._weights["embed_tokens.weight"])
        if family.norms_add_one:
            norms = [name for name in self._weights if name.endswith("norm.weight")]
            self._weights |= {name: self._weights[name] + 1.0 for name in norms}

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """The normed output of the last layer, [tokens, width], for int64 [tokens] at int64 [tokens]."""
        shape, family = self.shape, self.shape.family
        state = self._weights["embed_tokens.weight"][tokens] * shape.embedding_scale
        turns = {theta: _turns(positions, theta, shape.dim) for theta in set(shape.thetas)}
        for layer in range(shape.layers):
            weight = self._of(layer)
            q, k, v = self.projected(layer, self._norm(state, weight("input_layernorm")))
            turn = turns[shape.thetas[layer]]
            outputs = F.linear(
                attention(layer, _rotated(q, *turn), _rotated(k, *turn), v).flatten(1),
                weight("self_attn.o_proj"),
            )
            if family.after_attention is not None:
                outputs = self._norm(outputs, weight(family.after_attention))
            state = state + outputs
            for rows in torch.arange(len(state)).split(ROWS):
                normed = self._norm(state[rows], weight(family.before_mlp))
                gate = family.activation(F.linear(normed, weight("mlp.gate_proj")))
                down = F.linear(gate * F.linear(normed, weight("mlp.up_proj")), weight("mlp.down_proj"))
                if family.after_mlp is not None:
                    down = self._norm(down, weight(family.after_mlp))
                state[rows] += down
        return self._norm(state, self._weights["norm.weight"])

    def projected(self, layer: int, normed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values before rotation, out of a layer's normed input, [tokens, width]."""
        weight = self._of(layer)
        q, k, v = (
            F.linear(normed, weight(f"self_attn.{part}_proj")).unflatten(1, (-1, self.shape.dim))
            for part in "qkv"
        )
        if self.shape.family.norms_heads:
            q, k = self._norm(q, weight("self_attn.q_norm")), self._norm(k, weight("self_attn.k_norm"))
        return q, k, v

    def log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the next token, in nats, [tokens, vocabulary]."""
        return F.linear(hidden, self._head).log_softmax(dim=-1)

    def _of(self, layer: int) -> Callable[[str], torch.Tensor]:
        return lambda name: self._weights[f"layers.{layer}.{name}.weight"]

    def _norm(self, state: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(state, (state.shape[-1],), weight, self.shape.epsilon)


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UnknownModel(f"{file} cannot be read ({error}): {COPY_AGAIN}") from error


def _turns(positions: torch.Tensor, theta: float, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of a rotation, [tokens, 1, dim / 2]."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    angles = positions[:, None].double() * theta**-exponents
    return angles.cos().float()[:, None], angles.sin().float()[:, None]


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
            if shape.windows[layer] is None:
                outputs = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            else:
                seen = shape.sees(layer, positions, len(tokens))
                outputs = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
            return outputs[0].transpose(0, 1)

        positions = torch.arange(len(tokens))
        decoder.hidden(tokens, positions, attention)

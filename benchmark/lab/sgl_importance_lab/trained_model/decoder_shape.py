"""What of a checkpoint's config a decoder's arithmetic needs, for the architectures that it knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from sgl_importance.json_text import BadJson, read_json

COPY_AGAIN = "copy or download the model again"

_THETA = 10_000.0
"""Of the rotation, where a config names none."""

_PROJECTIONS = (
    "input_layernorm",
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
)


class UnknownModel(ValueError):
    """The folder holds no model that the decoder computes; the message says why."""


@dataclass(frozen=True)
class Family:
    """How the layers of an architecture compute.

    Attributes:
        activation: of the gate.
        before_mlp: name of the norm of what enters the MLP.
        after_attention: name of the norm of what attention adds; None: it adds it as it is.
        after_mlp: likewise of the MLP.
        norms_heads: whether queries and keys are normed before they are rotated.
        norms_add_one: whether norms multiply by one more than their weight.
        scales_embedding: whether embeddings are multiplied by the square root of their width.
    """

    activation: Callable[[torch.Tensor], torch.Tensor]
    before_mlp: str
    after_attention: str | None = None
    after_mlp: str | None = None
    norms_heads: bool = False
    norms_add_one: bool = False
    scales_embedding: bool = False

    @property
    def of_a_layer(self) -> tuple[str, ...]:
        """Names of a layer's weights."""
        norms = (self.before_mlp, self.after_attention, self.after_mlp)
        heads = ("self_attn.q_norm", "self_attn.k_norm") if self.norms_heads else ()
        return (*_PROJECTIONS, *heads, *(name for name in norms if name is not None))


_FAMILIES = {
    "llama": Family(F.silu, before_mlp="post_attention_layernorm"),
    "gemma3_text": Family(
        partial(F.gelu, approximate="tanh"),
        before_mlp="pre_feedforward_layernorm",
        after_attention="post_attention_layernorm",
        after_mlp="post_feedforward_layernorm",
        norms_heads=True,
        norms_add_one=True,
        scales_embedding=True,
    ),
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, and what each of its layers sees.

    Attributes:
        dim: of a head.
        thetas: base of the rotation, layer by layer.
        windows: last tokens that a layer sees, its own included; None: all of them.
        embedding_scale: factor of the embeddings.
    """

    layers: int
    heads: int
    kv_heads: int
    dim: int
    vocabulary: int
    context: int
    epsilon: float
    thetas: tuple[float, ...]
    windows: tuple[int | None, ...]
    embedding_scale: float
    family: Family

    @property
    def theta(self) -> float:
        """Base of the rotation in layers that see everything."""
        return self.thetas[self.whole_layers[0]]

    @property
    def whole_layers(self) -> tuple[int, ...]:
        """Layers that see the whole context."""
        return tuple(layer for layer, window in enumerate(self.windows) if window is None)

    def sees(self, layer: int, positions: torch.Tensor, tokens: int) -> torch.Tensor:
        """Which tokens of a context the queries of a layer see, bool [queries, tokens].

        Args:
            positions: of the queries, int64 [queries].
            tokens: of the context.
        """
        behind = positions[:, None] - torch.arange(tokens)
        window = self.windows[layer]
        return behind >= 0 if window is None else (behind >= 0) & (behind < window)

    @classmethod
    def of(cls, folder: Path) -> Shape:
        """Reads a checkpoint's config.

        Raises:
            UnknownModel: another architecture, positions that are scaled, or no config of a model.
        """
        path = folder / "config.json"
        config = _config(path)
        family = _FAMILIES.get(config.get("model_type", ""))
        if family is None:
            known = " or ".join(map(repr, _FAMILIES))
            raise UnknownModel(f"{folder}: model_type is {config.get('model_type')!r}, need {known}")
        try:
            heads, layers = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
            width = int(config["hidden_size"])
            types = config.get("layer_types") or ["full_attention"] * layers
            if len(types) != layers:
                raise UnknownModel(f"{folder}: {len(types)} layer_types for {layers} layers")
            dim = int(config.get("head_dim") or width // heads)
            if float(config.get("query_pre_attn_scalar") or dim) != dim:
                raise UnknownModel(f"{folder}: logits that are not scaled by their dimension")
            thetas = {of_type: _theta(folder, config, of_type) for of_type in set(types)}
            window = int(config["sliding_window"]) if "sliding_attention" in types else None
            return cls(
                layers=layers,
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                dim=dim,
                vocabulary=int(config["vocab_size"]),
                context=int(config["max_position_embeddings"]),
                epsilon=float(config["rms_norm_eps"]),
                thetas=tuple(thetas[of_type] for of_type in types),
                windows=tuple(window if of_type == "sliding_attention" else None for of_type in types),
                embedding_scale=width**0.5 if family.scales_embedding else 1.0,
                family=family,
            )
        except KeyError as error:
            raise UnknownModel(f"{path} lacks {error.args[0]}: {COPY_AGAIN}") from error
        except UnknownModel:  # a ValueError, too
            raise
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise UnknownModel(f"{path} is no config of a model ({error}): {COPY_AGAIN}") from error


def _theta(folder: Path, config: Mapping[str, Any], of_type: str) -> float:
    """Base of the rotation in layers of a type, where every type has its own or all have one."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(rope, dict) and isinstance(rope.get(of_type), dict):
        rope = rope[of_type]
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UnknownModel(f"{folder}: scaled positions ({rope}) are not computed here")
    return float(rope.get("rope_theta") or config.get("rope_theta") or _THETA)


def _config(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise UnknownModel(f"{path.parent} has no config.json: give the folder of a Hugging Face checkpoint")
    try:
        config = read_json(path.read_bytes())
    except (OSError, BadJson) as error:
        raise UnknownModel(f"{path} cannot be read ({error}): {COPY_AGAIN}") from error
    if not isinstance(config, dict):
        raise UnknownModel(f"{path} holds no JSON object: {COPY_AGAIN}")
    return config

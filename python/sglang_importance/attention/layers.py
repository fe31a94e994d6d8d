"""The attention layers of a model that page scores are taken from."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

ALL_LAYERS_UP_TO = 8
DEFAULT_LAYERS = 4


def attention_layers(model: torch.nn.Module, layers: Collection[int] | None = None) -> list[RadixAttention]:
    """The attention layers of a model, or those of given indices."""
    found = [module for module in model.modules() if isinstance(module, RadixAttention)]
    return found if layers is None else [layer for layer in found if layer.layer_id in layers]


def full_attention_layers(model: torch.nn.Module) -> list[int]:
    """Indices of the causal self-attention layers that see the whole sequence, ascending.

    Sliding-window layers forget, chunked ones (Llama 4's, with rotary embeddings) see their chunk,
    cross-attention looks at another sequence and bidirectional attention is not causal: none of them shows
    which pages of the prefix matter.
    """
    return sorted(
        {
            layer.layer_id
            for layer in attention_layers(model)
            if not layer.is_cross_attention
            and layer.attn_type == AttentionType.DECODER
            and layer.sliding_window_size <= 0
            and not layer.use_irope
        }
    )


def has_temperature(layer: RadixAttention) -> bool:
    """Whether the layer multiplies the logits of late query tokens by a factor of its own, as Grok's do."""
    return (layer.xai_temperature_len or -1) > 0


def sampled_layers(available: Sequence[int], requested: Sequence[int] = ()) -> tuple[int, ...]:
    """The layers to sample.

    Args:
        available: full-attention layers of the model, ascending.
        requested: the operator's choice; empty for the default: every layer of a model with at most 8, else
            4 of them spread over the upper half. That default is a convention, not a measurement: which
            layers hold the retrieval heads differs between models.

    Raises:
        ValueError: a requested layer is not available, or there is none.
    """
    if not available:
        raise ValueError(
            "the model has no causal full-attention layer to take page scores from: "
            "start with --kv-importance-source none"
        )
    if requested:
        unknown = sorted(set(requested) - set(available))
        if unknown:
            raise ValueError(
                f"signal.layers of --kv-importance-config: {_listed(unknown)} not among the full-attention "
                f"layers of this model, which are {_listed(available)}"
            )
        return tuple(sorted(set(requested)))
    if len(available) <= ALL_LAYERS_UP_TO:
        return tuple(available)
    upper = available[len(available) // 2 :]
    return tuple(upper[round(i * (len(upper) - 1) / (DEFAULT_LAYERS - 1))] for i in range(DEFAULT_LAYERS))


def _listed(layers: Sequence[int]) -> str:
    """Shortens runs: [0, 1, 2, 3, 7] is '0-3, 7'."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)

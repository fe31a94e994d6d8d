"""The attention layers of a model that page scores are taken from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

ALL_LAYERS_UP_TO = 8
DEFAULT_LAYERS = 4


def full_attention_layers(model: torch.nn.Module) -> list[int]:
    """Indices of the causal self-attention layers that see the whole sequence, ascending.

    Sliding-window layers forget, cross-attention looks at another sequence and bidirectional attention is
    not causal: none of them shows which pages of the prefix matter.
    """
    return sorted(
        {
            module.layer_id
            for module in model.modules()
            if isinstance(module, RadixAttention)
            and not module.is_cross_attention
            and module.attn_type == AttentionType.DECODER
            and module.sliding_window_size <= 0
        }
    )


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
                f"--kv-importance-layers: {_listed(unknown)} not among the full-attention layers "
                f"of this model, which are {_listed(available)}"
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

"""The longest context of a config, as sglang 0.5.21 reads it (``get_context_length``)."""

from __future__ import annotations

from sgl_importance_lab.kv_size.fields import Fields

_KEYS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
    "n_positions",  # transformers' older name of the one before
)
"""The first that is there counts."""
_MULTIPLIED = ("linear", "dynamic")
"""Rotary scalings whose factor sglang multiplies with: the others name the length before them."""
_SCALED_BY_LAYER = ("gemma3_text", "gemma3", "gemma3n_text", "gemma3n")
"""Types whose scaling transformers takes apart by the type of layers, where sglang sees no factor."""


def context_length(config: Fields, model_type: str) -> int | None:
    """Tokens; None where the config does not say.

    Raises:
        SizeError: what it says is no length.
    """
    key = next((key for key in _KEYS if key in config), None)
    if key is None:
        return None
    length = config.integer(key)
    if model_type in _SCALED_BY_LAYER:
        return length
    for name in ("rope_scaling", "rope_parameters"):
        if name in config:
            return int(length * _factor(config.inner(name)))
    return length


def _factor(scaling: Fields) -> float:
    if "original_max_position_embeddings" in scaling or "factor" not in scaling:
        return 1.0
    kind = next((scaling.word(name) for name in ("rope_type", "type") if name in scaling), "")
    return scaling.number("factor", low=1.0, high=1e4) if kind in _MULTIPLIED else 1.0

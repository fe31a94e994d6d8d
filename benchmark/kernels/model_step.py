"""The decode step of a whole model around its attention, to hold what emission adds against.

Weights are read once in every step, at the bandwidth that was measured; attention is what stock's took. The
rest of a step (norms, sampling, launches) is a guess, and a low one: a ratio comes out too high by it.
"""

from __future__ import annotations

WEIGHT_BYTES = 16.06e9
"""Llama-3.1-8B in bfloat16, whose 32 layers and 8 KV heads the stack has."""
OTHER_SECONDS = 0.5e-3


def model_step(attention_seconds: float, bandwidth: float) -> float:
    """Seconds of a step whose attention takes so long.

    Args:
        attention_seconds: of all layers.
        bandwidth: bytes per second.
    """
    return WEIGHT_BYTES / bandwidth + attention_seconds + OTHER_SECONDS

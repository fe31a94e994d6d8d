"""The attention backends that emit page scores; those that no GPU has run yet stand apart."""

from __future__ import annotations

# A producer of scores and the attention backend that it lives in.
PRODUCERS: dict[str, str] = {"torch_native": "torch_native"}
# Producers that no GPU has run yet: only the operator can choose them, and is warned. With the attention
# backends that they may be attached to.
UNPROVEN: dict[str, tuple[str, ...]] = {
    "qk_probe": ("fa3", "flashinfer", "triton"),
    "triton": ("triton",),
    "flashinfer": ("flashinfer",),
}
SOURCES: tuple[str, ...] = ("auto", *PRODUCERS, *UNPROVEN)

"""The producers of page scores: the attention backends that they live in, and where each has run."""

from __future__ import annotations

from collections.abc import Collection

NONE = "none"
"""No producer: attention is upstream's alone, and reuse is predicted without it."""
# A producer of scores and the attention backend that it lives in.
PRODUCERS: dict[str, str] = {"torch_native": "torch_native"}
# Kinds of device, as torch names them, that a producer has run on.
HAS_RUN_ON: dict[str, tuple[str, ...]] = {"torch_native": ("cpu",)}
# Producers that a GPU has run for minutes: only the operator can choose them, and is warned. With the
# attention backends that they may be attached to.
UNPROVEN: dict[str, tuple[str, ...]] = {
    "qk_probe": ("fa3", "flashinfer", "triton"),
    "triton": ("triton",),
    "flashinfer": ("flashinfer",),
}
LISTED_BACKEND = "torch_native"
"""The attention backend that page lists (``trace_pages``) have been taken beside, on a CPU."""
SOURCES: tuple[str, ...] = ("auto", NONE, *PRODUCERS, *UNPROVEN)


def automatic_source(device: str, backends: Collection[str]) -> str:
    """The producer that ``auto`` stands for: one that has run there, else none.

    Args:
        device: kind of device that the model runs on, as torch names it.
        backends: attention backends in use, for prefill and decode.
    """
    for source, backend in PRODUCERS.items():
        if set(backends) == {backend} and device in HAS_RUN_ON[source]:
            return source
    return NONE

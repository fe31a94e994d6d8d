"""Stands in for sglang-kernel, whose binaries (330 MB) cannot travel: what a Llama calls of it, in torch.

On CUDA sglang 0.5.21 builds most kernels of such a model itself. Of this package it imports many names and
calls few, which are written out here; any other can be imported, and says its name when it is called. Slower
than the binaries, and the same for whatever is compared.
"""

from __future__ import annotations

import torch
from torch.nn import functional
from unusable import Submodules
from unusable import unusable as __getattr__  # noqa: F401


def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    normed = functional.rms_norm(input.float(), weight.shape, weight.float(), eps).to(input.dtype)
    return normed if out is None else out.copy_(normed)


def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Adds ``input`` to ``residual`` in place, and leaves the norm of the sum in ``input``."""
    residual.add_(input)
    rmsnorm(residual, weight, eps, out=input)


def silu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    gate, up = input.chunk(2, dim=-1)
    product = functional.silu(gate) * up
    return product if out is None else out.copy_(product)


def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself: a captured graph's outputs then keep their memory."""
    return tensor


# sglang has a stand-in for it itself.
Submodules(__name__, missing="scalar_type").install()

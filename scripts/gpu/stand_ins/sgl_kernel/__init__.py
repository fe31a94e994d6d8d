"""Stands in for sglang-kernel, whose binaries (330 MB) cannot travel: what a Llama calls of it, in torch.

On CUDA sglang 0.5.21 builds most kernels of such a model itself. Of this package it imports many names and
calls few, which are written out here; any other can be imported, and says its name when it is called. Slower
than the binaries, and the same for whatever is compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch.nn import functional


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


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def unusable(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not in the stand-in for sglang-kernel (scripts/gpu)")

    return unusable


class _Submodules(MetaPathFinder, Loader):
    """Finds any submodule that has no file here, but the one that sglang has a stand-in for itself."""

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        within = fullname.startswith(f"{__name__}.") and fullname != f"{__name__}.scalar_type"
        return ModuleSpec(fullname, self, is_package=True) if within else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = __getattr__


sys.meta_path.append(_Submodules())

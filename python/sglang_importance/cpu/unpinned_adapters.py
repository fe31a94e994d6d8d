"""LoRA adapters without a GPU."""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from sglang_importance.cpu.shim import Shim


class UnpinnedAdapters(Shim):
    defect = (
        "sizes and weights of adapters are pinned, which needs an accelerator (lora/layers.py:467, "
        "lora/backend/torch_backend.py:225)"
    )

    _PINNING = ("tensor", "empty", "zeros", "ones", "arange")

    def needed(self) -> bool:
        if multiprocessing.parent_process() is None:
            return False  # only schedulers hold adapters, and only they have imported this
        from sglang.srt.lora import layers

        return "pin_memory=True" in inspect.getsource(layers) and not isinstance(layers.torch, _Unpinned)

    def apply(self) -> None:
        from sglang.srt.lora import layers
        from sglang.srt.lora.backend import torch_backend

        for module in (layers, torch_backend):
            vars(module)["torch"] = _Unpinned(self._PINNING)
        torch.Tensor.pin_memory = lambda tensor, *device: tensor  # type: ignore[method-assign]


class _Unpinned:
    """The module ``torch``, whose constructors pin nothing.

    Args:
        constructors: names of the functions that would.
    """

    def __init__(self, constructors: tuple[str, ...]) -> None:
        for name in constructors:
            setattr(self, name, _unpinned(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _unpinned(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(create)
    def create_unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return create(*args, **kwargs)

    return create_unpinned

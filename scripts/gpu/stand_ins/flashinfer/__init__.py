"""Stands in for flashinfer-python, for which there is no room beside sglang: imported on CUDA, never called.

With --sampling-backend pytorch, --attention-backend triton and SGLANG_IS_FLASHINFER_AVAILABLE=false.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def unusable(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not in the stand-in for flashinfer-python (scripts/gpu)")

    return unusable

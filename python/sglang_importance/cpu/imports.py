"""Packages built for CUDA that break imports on a machine without it."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NoReturn

from sglang_importance.cpu.shim import Shim


def _is_importable(package: str) -> bool:
    try:
        importlib.import_module(package)
    except Exception:  # a CUDA build fails with OSError, AssertionError, RuntimeError, ...
        return False
    return True


class CpuEngine(Shim):
    defect = "without SGLANG_USE_CPU_ENGINE RoPE imports vllm (rotary_embedding/base.py:133)"

    def needed(self) -> bool:
        return "SGLANG_USE_CPU_ENGINE" not in os.environ

    def apply(self) -> None:
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"


class TorchvisionOperators(Shim):
    defect = (
        "torchvision from PyPI is built for CUDA: its library does not load, and _meta_registrations.py:163 "
        "registers fakes of operators that were never declared"
    )

    _SCHEMAS = (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    )

    # torch takes a library's operators back when the object dies: it lives as long as the process.
    _library: ClassVar[Any] = None

    def needed(self) -> bool:
        spec = find_spec("torchvision")
        if spec is None or not spec.submodule_search_locations or "torchvision" in sys.modules:
            return False
        import torch

        # Declaring operators that the library declares too would abort the process: load it first.
        for library in Path(spec.submodule_search_locations[0]).glob("_C*.so"):
            try:
                torch.ops.load_library(library)
            except OSError:
                return True
            return False
        return True

    def apply(self) -> None:
        import torch

        TorchvisionOperators._library = library = torch.library.Library("torchvision", "DEF")
        for schema in self._SCHEMAS:
            library.define(schema)


class _UnusableKernels(ModuleType):
    """Stands in for ``sgl_kernel``: names can be imported, nothing can be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def unusable(*args: Any, **kwargs: Any) -> NoReturn:
            raise NotImplementedError(f"sgl_kernel.{name} needs an accelerator; this server runs on the CPU")

        return unusable


class SglKernel(Shim):
    defect = (
        "sgl_kernel is imported always (kernels/ops/kvcache/cache_move.py:10), its PyPI wheel is CUDA only"
    )

    def needed(self) -> bool:
        return not _is_importable("sgl_kernel")

    def apply(self) -> None:
        module = _UnusableKernels("sgl_kernel")
        module.__spec__ = ModuleSpec("sgl_kernel", None, is_package=True)
        module.__path__ = []
        sys.modules["sgl_kernel"] = module


class CudaOnlyPackages(Shim):
    defect = (
        "transformers and sglang import these where they are installed, and CUDA builds fail in ways that no "
        "guard expects (torchaudio: OSError; flashinfer: AssertionError at fp4_utils.py:24)"
    )

    _PACKAGES = ("flashinfer", "torchaudio", "torchcodec")

    def _unusable(self) -> list[str]:
        return [package for package in self._PACKAGES if find_spec(package) and not _is_importable(package)]

    def needed(self) -> bool:
        return any(package not in sys.modules and find_spec(package) for package in self._PACKAGES)

    def apply(self) -> None:
        for package in self._unusable():
            for name in [name for name in sys.modules if name.partition(".")[0] == package]:
                del sys.modules[name]
            sys.modules[package] = None  # type: ignore[assignment]  # the import system's "not there"

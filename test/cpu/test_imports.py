"""Packages built for CUDA: hidden or replaced only where they do not work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from sglang_importance.cpu.imports import CpuEngine, CudaOnlyPackages, SglKernel, TorchvisionOperators

TORCHVISION = """
from sglang_importance.cpu.imports import TorchvisionOperators
shim = TorchvisionOperators()
if {shimmed} and shim.needed():
    shim.apply()
import torchvision.ops
"""

MakePackage = Callable[..., None]


@pytest.fixture
def make_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePackage]:
    """Puts a package, given as the sources of its files, before an installed one of that name."""
    saved = dict(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def make(name: str, **sources: str) -> None:
        (tmp_path / name).mkdir()
        for module, source in sources.items():
            (tmp_path / name / f"{module}.py").write_text(source)
        sys.modules.pop(name, None)

    yield make
    for name in set(sys.modules) - set(saved):
        del sys.modules[name]
    sys.modules.update(saved)


def test_the_cpu_engine_is_chosen_unless_the_operator_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "0")
    assert not CpuEngine().needed()
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")
    assert CpuEngine().needed()
    CpuEngine().apply()
    assert os.environ["SGLANG_USE_CPU_ENGINE"] == "1"
    assert not CpuEngine().needed()


def test_a_working_sgl_kernel_stays(make_package: MakePackage) -> None:
    make_package("sgl_kernel", __init__="answer = 42")
    assert not SglKernel().needed()


def test_a_broken_sgl_kernel_becomes_names_that_cannot_be_called(make_package: MakePackage) -> None:
    make_package("sgl_kernel", __init__="raise ImportError('no libnvrtc')")
    assert SglKernel().needed()
    SglKernel().apply()
    sgl_kernel = import_module("sgl_kernel")
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.some_kernel needs an accelerator"):
        sgl_kernel.some_kernel(1, out=2)
    assert not hasattr(sgl_kernel, "__version__")
    assert not SglKernel().needed()


def test_only_unusable_packages_are_hidden(make_package: MakePackage) -> None:
    make_package("flashinfer", __init__="import flashinfer.gdn", gdn="assert False, 'no CUDA'")
    make_package("torchaudio", __init__="usable = True")
    assert CudaOnlyPackages().needed()
    CudaOnlyPackages().apply()

    assert find_spec("flashinfer") is None
    with pytest.raises(ImportError):
        import_module("flashinfer")
    assert "flashinfer.gdn" not in sys.modules
    assert import_module("torchaudio").usable


@pytest.mark.skipif(
    any(find_spec(package) for package in CudaOnlyPackages._PACKAGES), reason="one of them is installed"
)
def test_absent_packages_need_nothing() -> None:
    assert not CudaOnlyPackages().needed()


@pytest.mark.nightly
def test_torchvision_imports_whether_or_not_its_library_loads() -> None:
    def imports(*, shimmed: bool) -> bool:
        program = TORCHVISION.format(shimmed=shimmed)
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program], capture_output=True, timeout=120, text=True
        )
        # Without the shim only the defect that it names may be what fails.
        assert run.returncode == 0 or "torchvision::nms does not exist" in run.stderr, run.stderr
        return run.returncode == 0

    assert imports(shimmed=True)
    has_operators = import_module("torchvision.extension")._has_ops()
    assert imports(shimmed=False) == has_operators


def test_a_torchvision_whose_library_loads_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setattr("torch.ops.load_library", lambda path: None)
    assert not TorchvisionOperators().needed()

"""When the CPU runtime acts, and when it must not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from sglang_importance import cpu
from sglang_importance.cpu.shim import Shim, apply_needed

WHAT_CHANGES = """
import json, os, sys
import torch
torch.accelerator.is_available = lambda: {visible}
from sglang_importance import cpu

def state():
    modules = sorted(name for name in sys.modules if not name.startswith("sglang_importance"))
    return [dict(os.environ), torch.get_num_threads(), modules, list(map(repr, sys.meta_path))]

before = state()
cpu.activate()
{install}
print(json.dumps([cpu.applied_shims(), before == state(), torch.get_num_threads()]))
"""


def in_a_fresh_process(program: str) -> list[object]:
    """What the program prints last, without the variables that shims set."""
    unset = {"OMP_NUM_THREADS", "SGLANG_USE_CPU_ENGINE"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={name: value for name, value in os.environ.items() if name not in unset},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return json.loads(run.stdout.splitlines()[-1])


def test_beside_an_accelerator_nothing_changes() -> None:
    program = WHAT_CHANGES.format(visible=True, install="cpu.install()")
    applied, unchanged, _ = in_a_fresh_process(program)
    assert applied == []
    assert unchanged  # no module of sglang is loaded either, so none can have been hooked


def test_without_an_accelerator_imports_are_mended() -> None:
    applied, unchanged, threads = in_a_fresh_process(WHAT_CHANGES.format(visible=False, install=""))
    assert {"CpuEngine", "SpinningThreads", "SglKernel"} <= set(applied)
    assert not unchanged
    assert threads == 1


@pytest.mark.nightly
def test_importing_sglang_is_enough() -> None:
    applied, engine = in_a_fresh_process(
        "import json, os, sglang\n"
        "from sglang_importance.cpu import applied_shims\n"
        "print(json.dumps([applied_shims(), os.environ['SGLANG_USE_CPU_ENGINE']]))"
    )
    assert "SglKernel" in applied
    assert engine == "1"


@pytest.fixture
def shims_seen(monkeypatch: pytest.MonkeyPatch) -> list[Shim]:
    """As in a process where nothing has been applied yet; collects what would be."""
    seen: list[Shim] = []
    monkeypatch.setattr(cpu, "_applied", [])
    monkeypatch.setattr(cpu, "_activated", False)
    monkeypatch.setattr(cpu, "_installed", False)
    monkeypatch.setattr(
        "sglang_importance.cpu.shim.apply_needed",
        lambda shims: seen.extend(shims) or [type(shim).__name__ for shim in shims],
    )
    return seen


@pytest.mark.parametrize("step", [cpu.activate, cpu.install])
@pytest.mark.parametrize("visible", [True, False])
def test_an_accelerator_decides(
    step: Callable[[], None], visible: bool, shims_seen: list[Shim], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: visible)
    assert step() is None
    assert bool(shims_seen) is not visible
    assert cpu.applied_shims() == tuple(type(shim).__name__ for shim in shims_seen)


@pytest.mark.parametrize("step", [cpu.activate, cpu.install])
def test_acts_once(step: Callable[[], None], shims_seen: list[Shim]) -> None:
    step()
    first = len(shims_seen)
    step()
    assert len(shims_seen) == first > 0


@pytest.mark.parametrize(("value", "kept"), [(None, False), ("upstream", True)])
def test_the_switch_leaves_upstreams_attention(
    value: str | None, kept: bool, shims_seen: list[Shim], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGL_IMPORTANCE_CPU_ATTENTION", raising=False)
    if value:
        monkeypatch.setenv("SGL_IMPORTANCE_CPU_ATTENTION", value)
    cpu.install()
    ours = {"ExtendComputesCachedRows", "DecodeCopiesContext"}
    assert ours & set(cpu.applied_shims()) == (set() if kept else ours)
    assert "WindowPoolAndSinks" in cpu.applied_shims()


@pytest.mark.nightly
def test_another_value_of_the_switch_ends_every_launch_in_one_line() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--model-path", "none"],
        env={**os.environ, "SGL_IMPORTANCE_CPU_ATTENTION": "mine"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 2
    (line,) = [line for line in run.stderr.splitlines() if "CPU_ATTENTION" in line]
    assert line.startswith("sgl-importance: error: SGL_IMPORTANCE_CPU_ATTENTION='mine' is no choice")
    assert line.endswith("or unset it")
    assert "Traceback" not in run.stderr


def test_a_shim_whose_defect_is_gone_steps_aside() -> None:
    class Mended(Shim):
        defect = "none"

        def needed(self) -> bool:
            return False

        def apply(self) -> None:
            raise AssertionError("applied")

    assert apply_needed((Mended(),)) == []

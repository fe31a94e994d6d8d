"""Triton kernels compiled for real architectures, without a GPU: the interpreter allows more."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
NOT_COMPILED = [
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
    pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton comes without NVIDIA's tools"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]
ARCHITECTURES = [
    90,
    pytest.param(80, marks=pytest.mark.nightly),
    pytest.param(100, marks=pytest.mark.nightly),
]
LEAST_SHARED_MEMORY = 101_376  # sm_86, sm_89, sm_120

POINTERS = {
    "Locations": "*i32",
    "LocationStarts": "*i64",
    "SeqLens": "*i32",
    "FirstQueryRows": "*i32",
    "NumQueries": "*i32",
    "Starts": "*i32",
    "BatchRows": "*i32",
    "Slots": "*i32",
    "Gate": "*i32",
    "Logits": "*fp16",
}
FLOATS = ("scale", "empty_body", "log_sums_scale")


def signature(kernel: Any, constants: Mapping[str, Any], pointers: Mapping[str, str]) -> dict[str, str]:
    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name[0].isupper():
            return {**POINTERS, **pointers}.get(name, "*fp32")
        return "fp32" if name in FLOATS else "i32"

    return {name: kind(name) for name in kernel.arg_names}


def source_of(
    kernel: Any, constants: dict[str, Any], pointers: Mapping[str, str]
) -> tuple[ASTSource, dict[str, int]]:
    """What is compiled, and the options that ``constants`` bring beside the kernel's own.

    With ``is_aligned`` among the constants every pointer is that of a tensor, not of a part of one.
    """
    is_aligned = constants.get("is_aligned", False)
    known = {*kernel.arg_names, "is_aligned"}
    options = {name: value for name, value in constants.items() if name not in known}
    own = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = signature(kernel, own, pointers)
    aligned = {
        (at,): [["tt.divisibility", 16]] for at, kind in enumerate(types.values()) if kind.startswith("*")
    }
    source = ASTSource(kernel, signature=types, constexprs=own, attrs=aligned if is_aligned else None)
    return source, options


def resources(source: ASTSource, arch: int, folder: Path, **options: int) -> tuple[int, int, int]:
    """Registers per thread, bytes of stack, bytes of local memory."""
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(binary.asm["cubin"])
    report = subprocess.run(
        [str(CUOBJDUMP), "-res-usage", str(cubin)], capture_output=True, text=True, check=True
    ).stdout
    return tuple(map(int, re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", report).groups()))


def shared_memory(source: ASTSource, **options: int) -> int:
    """Bytes that a block of threads takes of it where it is least."""
    compiled = triton.compile(source, target=GPUTarget("cuda", 89, 32), options=options)
    return int(compiled.metadata.shared)


def assert_nothing_spills(
    kernel: Any, constants: dict[str, Any], pointers: Mapping[str, str], arch: int, folder: Path
) -> None:
    source, options = source_of(kernel, constants, pointers)
    registers, stack, local = resources(source, arch, folder, **options)
    assert registers <= 255
    assert (stack, local) == (0, 0)

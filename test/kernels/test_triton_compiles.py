"""The Triton kernels compiled for real architectures, without a GPU: the interpreter allows more."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from sgl_importance_kernels.triton import logit_reduction, page_reduction, qk_probe  # noqa: E402

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

pytestmark = [
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
    pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton comes without NVIDIA's tools"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

POINTERS = {
    "Locations": "*i32",
    "LocationStarts": "*i64",
    "SeqLens": "*i32",
    "FirstQueryRows": "*i32",
    "NumQueries": "*i32",
    "KvIndptr": "*i32",
    "Slots": "*i32",
    "Gate": "*i32",
    "Logits": "*fp16",
}
FLOATS = ("scale", "empty_body", "log_sums_scale")


def probe(page_size: int, group: int, block_m: int, dtype: tl.dtype = tl.bfloat16, key: str = "*bf16") -> Any:
    pages, page_tile = qk_probe.tile_of(page_size)
    constants = {
        "LOGIT_CAP": 30.0 if group == 8 else 0.0,
        "GROUP": group,
        "HEAD_DIM": 128,
        "BLOCK_D": 128,
        "BLOCK_M": block_m,
        "PAGE_SIZE": page_size,
        "PAGES": pages,
        "PAGE_TILE": page_tile,
        "DOT_DTYPE": dtype,
    }
    query = "*fp16" if dtype == tl.float16 else "*bf16"
    return pytest.param(
        qk_probe._qk_probe_kernel,
        constants,
        {"Q": query, "K": key},
        id=f"qk_probe-page{page_size}-group{group}-rows{block_m}-{key[1:]}",
    )


KERNELS = [
    probe(16, 4, 16),
    probe(1, 8, 16),
    probe(64, 4, 64),
    probe(16, 4, 16, key="*fp8e4nv"),
    probe(256, 4, 16, dtype=tl.float16, key="*fp16"),
    pytest.param(
        page_reduction._totals_kernel,
        {"NUM_HEADS": 32, "PAGE_SIZE": 16, "BLOCK": page_reduction.TOTALS_BLOCK},
        {},
        id="totals",
    ),
    pytest.param(
        page_reduction._rows_kernel,
        {
            "NUM_HEADS": 32,
            "NUM_LAYERS": 4,
            "PAGE_SIZE": 16,
            "BLOCK": page_reduction.ROWS_BLOCK,
            "HEADS": page_reduction.HEADS_BLOCK,
        },
        {},
        id="rows",
    ),
    pytest.param(
        logit_reduction._logit_rows_kernel,
        {
            "NUM_LAYERS": 4,
            "NUM_KV_HEADS": 8,
            "GROUP": 4,
            "BLOCK_G": 4,
            "PAGE_SIZE": 16,
            "PAGES": 8,
            "PAGE_TILE": 16,
        },
        {},
        id="logit_rows",
    ),
    pytest.param(
        logit_reduction._body_rows_kernel, {"PAGE_SIZE": 16, "PAGES": 8, "BLOCK": 1024}, {}, id="body_rows"
    ),
]


def signature(kernel: Any, constants: Mapping[str, Any], pointers: Mapping[str, str]) -> dict[str, str]:
    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name[0].isupper():
            return {**POINTERS, **pointers}.get(name, "*fp32")
        return "fp32" if name in FLOATS else "i32"

    return {name: kind(name) for name in kernel.arg_names}


@pytest.mark.parametrize(
    "arch", [90, pytest.param(80, marks=pytest.mark.nightly), pytest.param(100, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize(("kernel", "constants", "pointers"), KERNELS)
def test_kernels_compile_without_stack_or_spills(
    kernel: Any, constants: dict[str, Any], pointers: dict[str, str], arch: int, tmp_path: Path
) -> None:
    if arch < 89 and "fp8" in pointers.get("K", ""):
        pytest.skip("no fp8 conversion on this architecture in Triton")
    source = ASTSource(kernel, signature=signature(kernel, constants, pointers), constexprs=constants)
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32))
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(binary.asm["cubin"])
    report = subprocess.run(
        [str(CUOBJDUMP), "-res-usage", str(cubin)], capture_output=True, text=True, check=True
    ).stdout
    registers, stack, local = map(int, re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", report).groups())
    assert registers <= 255
    assert (stack, local) == (0, 0), report

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

from sgl_importance_kernels.sparse.triton import (  # noqa: E402
    attention_kernel,
    bits_kernel,
    choice_kernel,
    copy_kernel,
    scan_kernel,
    slot_kernel,
    write_kernel,
)
from sgl_importance_kernels.triton import logit_reduction, page_reduction, qk_probe, score_mod  # noqa: E402

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
    "Starts": "*i32",
    "BatchRows": "*i32",
    "Slots": "*i32",
    "Gate": "*i32",
    "Logits": "*fp16",
}
FLOATS = ("scale", "empty_body", "log_sums_scale")


def probe_constants(
    page_size: int, group: int, block_m: int, dtype: tl.dtype, head_dim: int = 128
) -> dict[str, Any]:
    pages, page_tile = qk_probe.tile_of(page_size)
    return {
        "LOGIT_CAP": 30.0 if group == 8 else 0.0,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": head_dim,
        "BLOCK_M": block_m,
        "PAGE_SIZE": page_size,
        "PAGES": pages,
        "PAGE_TILE": page_tile,
        "DOT_DTYPE": dtype,
    }


def probe(page_size: int, group: int, block_m: int, dtype: tl.dtype = tl.bfloat16, key: str = "*bf16") -> Any:
    constants = probe_constants(page_size, group, block_m, dtype)
    query = "*fp16" if dtype == tl.float16 else "*bf16"
    return pytest.param(
        qk_probe._qk_probe_kernel,
        constants,
        {"Q": query, "K": key},
        id=f"qk_probe-page{page_size}-group{group}-rows{block_m}-{key[1:]}",
    )


def page_scan(count: int) -> Any:
    constants = {
        "KV_HEADS": 8,
        "GROUP": 4,
        "HEAD_DIM": 128,
        "COUNT": count,
        "BLOCK_M": 16,
        "BLOCK_D": 128,
        "DOT_DTYPE": tl.bfloat16,
    }
    constants["BLOCK_PAGES"], constants["BLOCK_COUNT"] = scan_kernel.tile_of(count)
    pointers = {"Q": "*bf16", "Vectors": "*i8"} | dict.fromkeys(("Rows", "Pages", "NumPages"), "*i64")
    return pytest.param(scan_kernel._scan_kernel, constants, pointers, id=f"page_scan-{count}")


def page_codes(page_size: int, head_dim: int) -> Any:
    constants = {
        "KV_HEADS": 8,
        "GROUP": 4,
        "HEAD_DIM": head_dim,
        "PAGE_SIZE": page_size,
        "BLOCK_M": 16,
        "BLOCK_D": bits_kernel.BLOCK_D,
        "BLOCK_PAGES": bits_kernel.BLOCK_PAGES,
        "DOT_DTYPE": tl.bfloat16,
    }
    pointers = {"Q": "*bf16", "Kept": "*i8", "Widths": "*i32", "Starts": "*i32"}
    pointers |= dict.fromkeys(("Rows", "Pages", "NumPages"), "*i64")
    name = f"page_codes-page{page_size}-d{head_dim}"
    return pytest.param(bits_kernel._codes_kernel, constants, pointers, id=name)


def page_attention(page_size: int, head_dim: int) -> Any:
    page_tile = min(attention_kernel.TILE_TOKENS, page_size)
    constants = {
        "KV_HEADS": 8,
        "GROUP": 4,
        "KEY_DIM": head_dim,
        "VALUE_DIM": head_dim,
        "PAGE_SIZE": page_size,
        "BLOCK_M": 16,
        "BLOCK_K": head_dim,
        "BLOCK_V": head_dim,
        "PAGES": attention_kernel.TILE_TOKENS // page_tile,
        "PAGE_TILE": page_tile,
        "SPLIT": attention_kernel.SPLIT_PAGES,
        "DOT_DTYPE": tl.bfloat16,
    }
    pointers = dict.fromkeys(("Q", "SlotKeys", "SlotValues", "HostKeys", "HostValues", "Outputs"), "*bf16")
    pointers |= dict.fromkeys(("Rows", "Places", "LastTokens"), "*i64") | {"Arrivals": "*i32"}
    name = f"page_attention-page{page_size}-d{head_dim}"
    return pytest.param(attention_kernel._attend_kernel, constants, pointers, id=name)


def page_choice(most: int) -> Any:
    constants = {
        "HEADS": 32,
        "BLOCK_H": 32,
        "PAGE_SIZE": 16,
        "BLOCK_PAGES": choice_kernel.PAGES_AT_A_TIME,
        "BLOCK_ALL": most,
        "BLOCK_CHOSEN": 512,
        "FORCED": choice_kernel._FORCED,
        "LARGEST_KEY": choice_kernel._LARGEST_KEY,
    }
    pointers = dict.fromkeys(("Pages", "NumTokens", "MaxPages", "Chosen"), "*i64")
    return pytest.param(
        choice_kernel._choice_kernel,
        {**constants, "num_warps": choice_kernel.WARPS},
        pointers,
        id=f"page_choice-{most}",
    )


TABLES = {"PageIn": "*i32", "LastRead": "*i32", "Now": "*i32", "Order": "*i32", "SlotOf": "*i32"}


def page_slots(policy: str) -> Any:
    constants = {
        "LEVELS": slot_kernel.LEVELS,
        "BLOCK": slot_kernel.BLOCK,
        "POLICY": slot_kernel.POLICIES[policy],
        "DECAY": -0.07,
        "SMALLEST": slot_kernel._SMALLEST,
    }
    pointers = {**TABLES, "Counts": "*i32"}
    return pytest.param(slot_kernel._order_kernel, constants, pointers, id=f"page_slots-{policy}")


def page_place(*, has_shares: bool) -> Any:
    constants = {"HAS_SHARES": has_shares, "BY_SHARE": True, "DECAY": -0.07, "BLOCK": slot_kernel.BLOCK}
    pointers = {**TABLES, **dict.fromkeys(("Pages", "FrameOf", "Places", "Count", "Totals"), "*i64")}
    pointers |= {"Brought": "*i32", "Given": "*i32"}
    return pytest.param(
        slot_kernel._place_kernel,
        {**constants, "num_warps": slot_kernel.WARPS},
        pointers,
        id=f"page_place-{has_shares}",
    )


PAGE_NUMBERS = dict.fromkeys(("SourcePages", "TargetPages"), "*i64")
KERNELS = [
    *(page_scan(tokens) for tokens in (16, 32, 64)),  # a vector for each token of a page
    page_codes(16, 128),
    page_codes(64, 64),
    page_attention(16, 128),
    page_attention(64, 64),
    pytest.param(
        copy_kernel._copy_kernel,
        {"BLOCK": copy_kernel.BLOCK_NUMBERS},
        {**PAGE_NUMBERS, "Source": "*bf16", "Target": "*bf16"},
        id="page_copy",
    ),
    pytest.param(
        copy_kernel._bring_kernel,
        {"BLOCK": copy_kernel.BLOCK_NUMBERS},
        {
            **dict.fromkeys(("HostKeys", "HostValues", "SlotKeys", "SlotValues"), "*bf16"),
            "Brought": "*i32",
            "Slots": "*i32",
            "Count": "*i64",
        },
        id="page_bring",
    ),
    pytest.param(
        write_kernel._write_kernel,
        {"PAGE_SIZE": 16, "BLOCK": copy_kernel.BLOCK_NUMBERS},
        {
            **dict.fromkeys(("NewKeys", "NewValues", "SlotKeys", "SlotValues"), "*bf16"),
            **dict.fromkeys(("HostKeys", "HostValues"), "*bf16"),
            "Pages": "*i64",
            "Offsets": "*i64",
            "Frames": "*i64",
            "IsReopened": "*i1",
        },
        id="page_write",
    ),
    page_choice(2048),
    page_choice(choice_kernel.MOST_PAGES),
    *(page_slots(policy) for policy in ("lru", "bucketed_lru", "ema")),
    page_place(has_shares=True),
    page_place(has_shares=False),
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
            "TO_PARTIALS": True,
        },
        {},
        id="rows",
    ),
    pytest.param(
        page_reduction._partials_kernel,
        {"PAGE_SIZE": 16, "BLOCK": page_reduction.ROWS_BLOCK},
        {},
        id="partials",
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


def source_of(
    kernel: Any, constants: dict[str, Any], pointers: Mapping[str, str]
) -> tuple[ASTSource, dict[str, int]]:
    """What is compiled, and the options that ``constants`` bring beside the kernel's own."""
    options = {name: value for name, value in constants.items() if name not in kernel.arg_names}
    own = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return ASTSource(kernel, signature=signature(kernel, own, pointers), constexprs=own), options


@pytest.mark.parametrize(
    "arch", [90, pytest.param(80, marks=pytest.mark.nightly), pytest.param(100, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize(("kernel", "constants", "pointers"), KERNELS)
def test_kernels_compile_without_stack_or_spills(
    kernel: Any, constants: dict[str, Any], pointers: dict[str, str], arch: int, tmp_path: Path
) -> None:
    if arch < 89 and "fp8" in pointers.get("K", ""):
        pytest.skip("no fp8 conversion on this architecture in Triton")
    source, options = source_of(kernel, constants, pointers)
    registers, stack, local = resources(source, arch, tmp_path, **options)
    assert registers <= 255
    assert (stack, local) == (0, 0)


LEAST_SHARED_MEMORY = 101_376  # sm_86, sm_89, sm_120


@pytest.mark.parametrize(
    ("kernel", "constants", "pointers"), [each for each in KERNELS if "page_" in (each.id or "")]
)
def test_kernels_of_tiered_pages_fit_where_shared_memory_is_least(
    kernel: Any, constants: dict[str, Any], pointers: dict[str, str]
) -> None:
    source, options = source_of(kernel, constants, pointers)
    compiled = triton.compile(source, target=GPUTarget("cuda", 89, 32), options=options)
    assert compiled.metadata.shared <= LEAST_SHARED_MEMORY


@pytest.mark.parametrize(
    ("page_size", "group"),
    [(16, 4), pytest.param(1, 8, marks=pytest.mark.nightly), pytest.param(256, 8, marks=pytest.mark.nightly)],
)
def test_tiles_of_the_longest_keys_fit_where_shared_memory_is_least(page_size: int, group: int) -> None:
    rows = qk_probe.tile_rows(32 * group, 256, 2, page_size, LEAST_SHARED_MEMORY)
    assert rows == (32 if page_size < 256 else 64)
    constants = probe_constants(page_size, group, rows, tl.bfloat16, head_dim=256)
    kernel = qk_probe._qk_probe_kernel
    types = signature(kernel, constants, {"Q": "*bf16", "K": "*bf16"})
    source = ASTSource(kernel, signature=types, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 89, 32)).metadata.shared <= LEAST_SHARED_MEMORY


def test_rows_are_as_many_as_are_needed_and_fit() -> None:
    def rows(wanted: int, head_dim: int, itemsize: int, shared_memory: int) -> int:
        return qk_probe.tile_rows(wanted, head_dim, itemsize, 16, shared_memory)

    hopper, ampere = 232_448, 166_912
    assert [rows(wanted, 128, 2, LEAST_SHARED_MEMORY) for wanted in (1, 17, 64, 1000)] == [16, 32, 64, 64]
    assert [rows(64, 256, 2, memory) for memory in (hopper, ampere, LEAST_SHARED_MEMORY)] == [64, 64, 32]
    assert [rows(64, 256, 4, memory) for memory in (hopper, ampere, LEAST_SHARED_MEMORY)] == [64, 16, 0]


def resources(source: ASTSource, arch: int, folder: Path, **options: int) -> tuple[int, int, int]:
    """Registers per thread, bytes of stack, bytes of local memory."""
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(binary.asm["cubin"])
    report = subprocess.run(
        [str(CUOBJDUMP), "-res-usage", str(cubin)], capture_output=True, text=True, check=True
    ).stdout
    return tuple(map(int, re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", report).groups()))


def blocks_per_multiprocessor(registers: int) -> int:
    """Of 4 warps; registers are handed out in eights."""
    return 65536 // (128 * -(-registers // 8) * 8)


@pytest.mark.parametrize("page_size", [16, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("group", [4, pytest.param(8, marks=pytest.mark.nightly)])
def test_the_score_mod_costs_upstream_s_kernel_no_blocks(page_size: int, group: int, tmp_path: Path) -> None:
    upstream = pytest.importorskip("sglang.kernels.ops.attention.decode_attention")
    kernel = upstream._fwd_grouped_kernel_stage1
    constants = {
        "kv_group_num": group,
        "q_head_num": 32,
        "BLOCK_DMODEL": 128,
        "BLOCK_DPE": 0,
        "BLOCK_DV": 128,
        "BLOCK_N": 32,
        "BLOCK_H": upstream._GROUPED_BLOCK_H,
        "MIN_BLOCK_KV": upstream._MIN_BLOCK_KV,
        "logit_cap": 0.0,
        "xai_temperature_len": -1,
        "Lk": 128,
        "Lv": 128,
        "HAS_MLA": False,
        "USE_PDL": False,
        "IS_GFX1250": False,
        "PAGE_SIZE": page_size,
        "USE_FORCED": False,
        "forced_kv_splits": 0,
    }
    stock_constants = {"SCORE_MOD": None, "Aux0": None, "aux0_stride_t": 0, "aux0_stride_h": 0, "aux0_len": 0}
    pointers = dict.fromkeys(("Q", "K_Buffer", "V_Buffer"), "*bf16") | dict.fromkeys(
        ("kv_indptr", "num_kv_splits"), "*i32"
    )
    pointers |= {"kv_indices": "*i64", "sm_scale_withk": "fp32"}

    def compiled(emission: dict[str, Any]) -> tuple[int, int, int]:
        given = {name: value for name, value in (constants | emission).items() if name in kernel.arg_names}
        types = signature(kernel, given, pointers) | {
            name: kind for name, kind in pointers.items() if name in kernel.arg_names
        }
        return resources(
            ASTSource(kernel, signature=types, constexprs=given), 90, tmp_path, num_warps=4, num_stages=2
        )

    stock = compiled(stock_constants)
    ours = compiled({"SCORE_MOD": score_mod.SCORE_MODS[page_size]})
    assert ours[1:] == stock[1:] == (0, 0), (ours, stock)
    assert blocks_per_multiprocessor(ours[0]) == blocks_per_multiprocessor(stock[0]), (ours, stock)

"""The kernels of page scores compiled for real architectures, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton.language as tl
from triton.compiler import ASTSource

from sgl_importance_kernels.triton import logit_reduction, page_reduction, qk_probe, score_mod

from support.compiling import (
    ARCHITECTURES,
    LEAST_SHARED_MEMORY,
    NOT_COMPILED,
    assert_nothing_spills,
    resources,
    shared_memory,
    signature,
)

pytestmark = NOT_COMPILED


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


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("kernel", "constants", "pointers"), KERNELS)
def test_kernels_compile_without_stack_or_spills(
    kernel: Any, constants: dict[str, Any], pointers: dict[str, str], arch: int, tmp_path: Path
) -> None:
    if arch < 89 and "fp8" in pointers.get("K", ""):
        pytest.skip("no fp8 conversion on this architecture in Triton")
    assert_nothing_spills(kernel, constants, pointers, arch, tmp_path)


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
    assert shared_memory(source) <= LEAST_SHARED_MEMORY


def test_rows_are_as_many_as_are_needed_and_fit() -> None:
    def rows(wanted: int, head_dim: int, itemsize: int, shared_memory: int) -> int:
        return qk_probe.tile_rows(wanted, head_dim, itemsize, 16, shared_memory)

    hopper, ampere = 232_448, 166_912
    assert [rows(wanted, 128, 2, LEAST_SHARED_MEMORY) for wanted in (1, 17, 64, 1000)] == [16, 32, 64, 64]
    assert [rows(64, 256, 2, memory) for memory in (hopper, ampere, LEAST_SHARED_MEMORY)] == [64, 64, 32]
    assert [rows(64, 256, 4, memory) for memory in (hopper, ampere, LEAST_SHARED_MEMORY)] == [64, 16, 0]


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
        "uneven_batch": None,  # 0.5.23
        "ROTATE_BATCH": False,
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

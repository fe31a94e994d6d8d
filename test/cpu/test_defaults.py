"""Defaults of a server on the CPU, as sglang resolves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.common import cpu_has_amx_support

from sglang_importance.cpu.defaults import DEFAULT_POOL_TOKENS, SpinningThreads


def resolved(model: Path, **fields: Any) -> Any:
    arguments = ServerArgs(model_path=str(model), device="cpu", **fields)
    arguments.resolve_once()
    return resolving_view(arguments)


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, DEFAULT_POOL_TOKENS), ({"max_total_tokens": 512}, 512), ({"mem_fraction_static": 0.1}, None)],
    ids=["none", "tokens", "fraction"],
)
def test_the_pool_is_bounded_unless_its_size_is_given(
    probe_model: Path, given: dict[str, Any], expected: int | None
) -> None:
    assert resolved(probe_model, **given).max_total_tokens == expected


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_transfers_need_no_kernel(probe_model: Path, layout: str) -> None:
    view = resolved(probe_model, enable_hierarchical_cache=True, hicache_mem_layout=layout)
    assert view.hicache_io_backend == "direct"
    assert view.hicache_mem_layout == ("layer_first" if layout == "layer_first" else "page_first_direct")


@pytest.mark.parametrize("backend", [None, "intel_amx", "torch_native"])
def test_attention_falls_back_to_torch(probe_model: Path, backend: str | None) -> None:
    view = resolved(probe_model, attention_backend=backend)
    if cpu_has_amx_support() and backend != "torch_native":
        pytest.skip("this CPU has AMX, and sglang its kernels")
    assert view.attention_backend == "torch_native"


def test_threads_are_the_operators_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert not SpinningThreads().needed()
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert SpinningThreads().needed()

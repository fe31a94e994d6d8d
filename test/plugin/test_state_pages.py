"""Linear attention: page size and strategy on a CPU, where our parts are, what it costs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.arg_groups import overrides
from sglang.srt.arg_groups.mamba_hook import validate_mamba_no_buffer
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

from sglang_importance.attention.source import softmax_backend
from sglang_importance.cpu.defaults import StatesWithoutBuffer
from sglang_importance.launch.state_pages import HOOKS
from sglang_importance.tree.nominal_costs import attending_layers
from sglang_importance.upstream.refusal import LaunchRefused

LINE = "linear attention has no pages of 16 tokens with --mamba-radix-cache-strategy no_buffer"


def checked(page_size: int | None, command: str | None) -> None:
    ((check, _),) = HOOKS.values()
    view: Any = SimpleNamespace(
        page_size=page_size, launch_command=command, disable_overlap_schedule=True, attention_backend=None
    )
    check(validate_mamba_no_buffer, view, "Qwen3NextForCausalLM")


@pytest.mark.parametrize("page_size", [None, 1])
def test_pages_of_one_token_pass(page_size: int | None) -> None:
    checked(page_size, None)


def test_others_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchRefused) as refused:
        checked(16, None)
    (line,) = refused.value.reasons
    assert line.startswith(LINE)
    assert line.endswith("use --page-size 1")
    with pytest.raises(SystemExit):
        checked(16, "sglang serve")
    assert capsys.readouterr().err == f"sgl-importance: error: {line}\n"


def test_on_a_cpu_auto_is_the_strategy_that_a_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    shim = StatesWithoutBuffer()
    monkeypatch.setattr(overrides, "supports_mamba_cache_extra_buffer", lambda view, config: True)
    assert shim.needed()
    shim.apply()
    assert not overrides.supports_mamba_cache_extra_buffer(None, None)
    assert not shim.needed()


def test_the_backend_with_scores_is_found_within_the_hybrid_one() -> None:
    softmax = SimpleNamespace(rows="rows")
    runner: Any = SimpleNamespace(attn_backend=SimpleNamespace(full_attn_backend=softmax))
    assert softmax_backend(runner) is softmax
    runner.attn_backend = softmax
    assert softmax_backend(runner) is softmax


def test_linear_attention_does_not_look_back() -> None:
    pool = object.__new__(HybridLinearKVPool)
    pool.full_attention_layer_id_mapping = {3: 0, 7: 1}
    assert attending_layers(pool, 8) == 2
    plain: Any = object()
    assert attending_layers(plain, 8) == 8

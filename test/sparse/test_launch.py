"""What cannot run with tiered pages is refused before anything is loaded."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.placement_options import StoreOptions
from sgl_importance.options.tiered_options import SparseOptions, TieredOptions
from sgl_importance_kernels.sparse.page_slots import PageSlots
from sglang_importance.launch.flags import select_cache
from sglang_importance.launch.modes.arguments import refusals
from sglang_importance.launch.modes.tiered_pages import warn_of_dummy_weights
from sglang_importance.sparse.emitting_backend import EmittingTieredBackend
from sglang_importance.sparse.install import HOOKS, _tiered_pool
from sglang_importance.sparse.selector_calibration import turns_halves
from sglang_importance.sparse.tiered_backend import TieredAttentionBackend
from sglang_importance.storage.store_launch import TIERED_STAGING_RATIO, mount, store_refusals
from sglang_importance.upstream.hooks import install_hooks
from sglang_importance.upstream.refusal import LaunchRefused

TIERED = ImportanceOptions(policy="importance", tiered=TieredOptions(residency="tiered"))


def args(**changes: Any) -> ServerArgs:
    return ServerArgs(model_path="dummy", device="cpu", **changes)


@pytest.mark.parametrize("policy", ["default", "observe"])
def test_tiered_pages_need_the_policy(policy: str) -> None:
    with pytest.raises(ValueError, match="--kv-residency 'tiered' needs --kv-policy to be 'importance'"):
        ImportanceOptions(policy=policy, tiered=TieredOptions(residency="tiered"))


@pytest.mark.parametrize(
    ("changes", "cure"),
    [
        ({"page_size": 1}, "use --page-size 16"),
        ({"startup_weight_load_mode": "overlap"}, "use --startup-weight-load-mode serial"),
        ({"prefill_attention_backend": "fa3"}, "drop --prefill-attention-backend"),
        (
            {"enable_hierarchical_cache": True},
            "name a directory for storage below with --kv-importance-store",
        ),
    ],
)
def test_a_conflict_is_one_line_with_its_cure(changes: dict[str, Any], cure: str) -> None:
    lines = refusals(ServerArgs(**{"model_path": "dummy", "device": "cpu", **changes}), TIERED)
    (line,) = [
        line for line in lines if "--kv-residency tiered does not support" in line or "HiCache" in line
    ]
    assert cure in line
    full = ImportanceOptions(policy="importance")
    assert not [line for line in refusals(args(), full) if "tiered" in line]


def gpu(**changes: Any) -> ServerArgs:
    given = {"attention_backend": "triton", "disable_cuda_graph": True, "max_total_tokens": 65536, **changes}
    return ServerArgs(model_path="dummy", device="cuda", page_size=16, **given)


@pytest.mark.parametrize(
    ("changes", "cure"),
    [
        ({"attention_backend": "torch_native"}, "use --attention-backend triton"),
        ({"disable_cuda_graph": False}, "add --disable-cuda-graph"),
        ({"max_total_tokens": None}, "with --max-total-tokens"),
    ],
)
def test_a_gpu_has_conflicts_of_its_own(changes: dict[str, Any], cure: str) -> None:
    assert refusals(gpu(), TIERED) == []
    (line,) = refusals(gpu(**changes), TIERED)
    assert cure in line


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
def test_no_pool_is_built_of_the_quantized_kv_that_a_checkpoint_asks_for(dtype: torch.dtype) -> None:
    heads = SimpleNamespace(head_dim=64, v_head_dim=64)
    configurator = SimpleNamespace(kv_cache_dtype=dtype, kv_cache_dtype_str="auto", model_config=heads)
    with pytest.raises(LaunchRefused) as refused:
        _tiered_pool(pytest.fail, configurator, max_total_num_tokens=64)  # type: ignore[arg-type]
    (line,) = refused.value.reasons
    assert line == (
        "--kv-residency tiered does not support a checkpoint's quantized KV cache: use --kv-residency full"
    )


@pytest.mark.parametrize(
    ("rotations", "turns"),
    [
        ([{}], True),
        ([{"partial_rotary_factor": 0.5}], False),  # GLM-4, Phi
        ([{"is_neox_style": False}], False),  # Cohere
        ([{}, {"is_neox_style": False}], False),
        ([], False),
    ],
)
def test_channels_share_bits_where_positions_turn_halves_of_a_head(
    rotations: list[dict[str, Any]], turns: bool
) -> None:
    model = torch.nn.ModuleList(get_rope(16, 16, 64, 10000, **rotation) for rotation in rotations)
    model.rotary_dim = 16  # as attention of Llama's has, with no head_size
    assert turns_halves(model) is turns


def test_no_pool_is_built_of_keys_and_values_of_different_sizes() -> None:
    heads = SimpleNamespace(head_dim=192, v_head_dim=128)
    configurator = SimpleNamespace(kv_cache_dtype=torch.bfloat16, model_config=heads)
    with pytest.raises(LaunchRefused, match="keys and values differ in size: use --kv-residency full"):
        _tiered_pool(pytest.fail, configurator, max_total_num_tokens=64)  # type: ignore[arg-type]


def test_no_model_writes_pages_in_the_kernel_of_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where such models would write bfloat16 to the host's buffers and not to frames."""
    from sglang.srt.models import qwen3_moe, utils

    fused = "enable_fused_set_kv_buffer"
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    for module in (utils, qwen3_moe):
        monkeypatch.setattr(module, fused, getattr(module, fused))  # as before, after the test
    monkeypatch.setattr(utils, "_is_cuda", True)
    monkeypatch.setattr(utils, "is_cp_active", lambda _: False)
    pool = SimpleNamespace(dtype=torch.bfloat16)
    context = ForwardContext(attn_backend=SimpleNamespace(token_to_kv_pool=pool))  # type: ignore[arg-type]
    with forward_context(context):
        assert qwen3_moe.enable_fused_set_kv_buffer(SimpleNamespace()), "stock writes elsewhere"
        install_hooks({target: hook for target, hook in HOOKS.items() if target.endswith(fused)})
        assert not qwen3_moe.enable_fused_set_kv_buffer(SimpleNamespace())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_slots_hold_no_quantized_keys(dtype: torch.dtype) -> None:
    host = [torch.zeros(32, 1, 8, dtype=dtype)]
    with pytest.raises(AssertionError, match="quantized keys"):
        PageSlots(host, host, num_frames=1, num_slots=1, page_size=16, staging_pages=1, device="cpu")


@pytest.mark.parametrize("step", ["extend", "decode"])
@pytest.mark.parametrize("kind", [TieredAttentionBackend, EmittingTieredBackend])
def test_learnt_sinks_are_not_left_out_of_a_softmax(kind: type[Any], step: str) -> None:
    forward = getattr(kind.__new__(kind), f"forward_{step}")
    nothing = torch.zeros(1, 8)
    with pytest.raises(NotImplementedError, match="learnt sinks"):
        forward(nothing, nothing, nothing, SimpleNamespace(), SimpleNamespace(), sinks=torch.zeros(1))


def test_storage_below_a_gpu_is_refused(tmp_path: Path) -> None:
    (line,) = refusals(gpu(), replace(TIERED, store=StoreOptions(directory=str(tmp_path))))
    assert "drop --kv-importance-store" in line


def test_one_attention_backend_reads_tiered_pages() -> None:
    (line,) = refusals(args(attention_backend="torch_native", decode_attention_backend="triton"), TIERED)
    assert "one attention backend for prefill and decode, not torch_native and triton" in line


def test_triton_has_no_page_scores_of_tiered_pages() -> None:
    lines = refusals(args(attention_backend="triton"), replace(TIERED, source="qk_probe"))
    assert any("drop --kv-importance-source qk_probe" in line for line in lines)


def test_what_is_not_named_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    given = args()
    select_cache(given, TIERED)
    assert given.page_size == 16
    assert refusals(given, TIERED) == []
    (line,) = caplog.messages
    assert line.startswith("KV importance: pages of 16 tokens, since none were named")
    named = args(page_size=32)
    select_cache(named, TIERED)
    assert named.page_size == 32
    assert caplog.messages == [line]


def test_weights_that_bits_is_not_calibrated_by_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    bits = replace(TIERED, sparse=SparseOptions(selector="bits"))
    warn_of_dummy_weights(args(load_format="dummy"), TIERED)
    warn_of_dummy_weights(args(), bits)
    assert caplog.messages == []
    warn_of_dummy_weights(args(load_format="dummy"), bits)
    (line,) = caplog.messages
    assert "--kv-sparse-selector bits is calibrated by the random weights of --load-format dummy" in line


def test_a_field_that_another_release_lacks_refuses_nothing() -> None:
    given = args(page_size=16)
    fields = {field: getattr(given, field) for field in given.__struct_fields__}
    fields.pop("startup_weight_load_mode")
    assert refusals(SimpleNamespace(**fields), TIERED) == []


def test_storage_below_gets_a_staging_buffer_not_a_host_tier(tmp_path: Path) -> None:
    options = ImportanceOptions(
        policy="importance",
        tiered=TieredOptions(residency="tiered"),
        store=StoreOptions(directory=str(tmp_path)),
    )
    given = args()
    mount(given, options)  # type: ignore[arg-type]
    assert given.hicache_host_memory_mode == "buffer_only"
    assert given.hicache_ratio == TIERED_STAGING_RATIO
    assert store_refusals(given, options) == []
    assert refusals(given, options) == []
    (line,) = store_refusals(
        given, ImportanceOptions(policy="importance", store=StoreOptions(directory=str(tmp_path)))
    )
    assert "use --hicache-host-memory-mode cache" in line

    chosen = args(hicache_ratio=0.5)
    mount(chosen, options)  # type: ignore[arg-type]
    assert chosen.hicache_ratio == 0.5


@pytest.mark.parametrize(("given", "tokens"), [(0.25, 1024), (1.0, 1), (512, 512)])
def test_device_memory_is_told_in_tokens_or_as_a_share(given: float, tokens: int) -> None:
    tiered = TieredOptions(residency="tiered", device_tokens=given)
    options = ImportanceOptions(policy="importance", tiered=tiered)
    assert options.device_tokens_of(4096) == tokens

"""Every formula beside sglang itself: its reading of the same config.json, its pools, its arithmetic.

Pools are built on the CPU and their tensors counted: K, V, scales, latents, indexers' keys, states, all with
their padding. What sglang cannot build without a GPU is compared with the arithmetic that sizes it.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest

from sgl_importance_lab.kv_size.capacity import Division, fit
from sgl_importance_lab.kv_size.config_file import read_shape
from sgl_importance_lab.kv_size.deployment import Deployment, stages
from sgl_importance_lab.kv_size.families import FAMILIES
from sgl_importance_lab.kv_size.fields import SizeError
from sgl_importance_lab.kv_size.geometry import HeadGeometry
from sgl_importance_lab.kv_size.request import window_slots

from support.drivers.upstream_pools import CLASSES_BESIDE_WEIGHTS, UpstreamPools, served_with
from support.workloads.kv_configs import (
    WINDOW,
    deployment_of,
    has_text_apart,
    text_of,
    tiny_config,
)

FULL, WINDOWED, STATES = 256, 128, 5


def _upstream(config: dict[str, Any], folder: Path, deployment: Deployment, stage: int = 0) -> UpstreamPools:
    return UpstreamPools(
        config,
        folder,
        dtype=deployment.dtype.name,
        pp=deployment.pp,
        stage=stage,
        page_size=deployment.page_size,
        draft_layers=deployment.draft_layers,
        sliding_window_size=WINDOW,
    )


def _compare_pools(config: dict[str, Any], folder: Path, deployment: Deployment, **options: Any) -> None:
    """Tensor by tensor, on a GPU of each stage."""
    for number, stage in enumerate(stages(read_shape(config), deployment)):
        with served_with(
            attention_tp=deployment.attention_tp,
            page_size=deployment.page_size,
            max_running_requests=4,
            **options,
        ):
            built = _upstream(config, folder, deployment, number).allocated(FULL, WINDOWED, STATES)
        assert +stage.pool_bytes(deployment, FULL, WINDOWED, STATES) == built, f"stage {number}"


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_pools_have_the_bytes_that_we_say(model_type: str, tp: int, tmp_path: Path) -> None:
    # Eight GPUs for four KV heads: each head lies on two of them.
    _compare_pools(tiny_config(model_type), tmp_path, deployment_of(model_type, tp=tp))


@pytest.mark.parametrize(
    "model_type", ["llama", "deepseek_v3", "glm_moe_dsa", "gpt_oss", "qwen3_next", "nemotron_h"]
)
def test_stages_have_the_layers_that_we_say(model_type: str, tmp_path: Path) -> None:
    # Three stages of four layers: the last has one more.
    _compare_pools(tiny_config(model_type), tmp_path, deployment_of(model_type, pp=3, tp=2))


@pytest.mark.parametrize(
    ("model_type", "dtype", "changes"),
    [
        ("llama", "float32", {}),
        ("llama", "fp8_e4m3", {}),
        ("llama", "fp8_e5m2", {}),
        ("llama", "mxfp8", {}),
        ("llama", "mxfp8", {"head_dim": 128}),
        ("llama", "fp4_mx_block16", {}),
        ("llama", "nvfp4", {}),
        ("gpt_oss", "mxfp8", {}),
        ("mimo_v2_flash", "mxfp8", {}),
        ("mimo_v2_flash", "fp8_e4m3", {}),
        ("deepseek_v3", "fp8_e4m3", {}),
        ("deepseek_v3", "fp4_mx_block16", {}),
        ("deepseek_v3", "nvfp4", {}),
        ("deepseek_v32", "fp8_e4m3", {}),
        ("minimax_m3_vl", "fp8_e4m3", {}),
        ("qwen3_next", "mxfp8", {}),
        ("qwen3_next", "nvfp4", {}),
        ("qwen3_next", "bfloat16", {"mamba_ssm_dtype": "bfloat16"}),
        ("nemotron_h", "bfloat16", {"mamba_ssm_dtype": "float32"}),
        ("kimi_linear", "fp8_e5m2", {}),
    ],
)
def test_dtypes_with_their_scales(
    model_type: str, dtype: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "fp4" in dtype:  # sglang knows the type of the elements on CUDA only; its buffers are bytes.
        monkeypatch.setattr("sglang.srt.utils.common.is_cuda", lambda: True)
    _compare_pools(tiny_config(model_type, **changes), tmp_path, deployment_of(model_type, dtype=dtype, tp=2))


@pytest.mark.parametrize(
    "changes",
    [
        {"indexer_types": None, "index_topk_freq": 2},
        {"indexer_types": None, "index_topk_freq": 3, "index_skip_topk_offset": 1},
        {"indexer_types": None, "index_topk_pattern": "FSSF"},
        {"indexer_types": ["full", "shared", "shared", "full"]},
    ],
)
def test_layers_that_take_over_a_choice_keep_no_index(changes: dict[str, Any], tmp_path: Path) -> None:
    config = {
        name: value for name, value in tiny_config("deepseek_v32", **changes).items() if value is not None
    }
    _compare_pools(config, tmp_path, deployment_of("deepseek_v32"))
    # Under HiCache all layers keep one.
    deployment = deployment_of("deepseek_v32", index_everywhere=True)
    _compare_pools(config, tmp_path, deployment, enable_hierarchical_cache=True)


def test_latents_without_scales_for_kernels_that_want_none(tmp_path: Path) -> None:
    deployment = deployment_of("deepseek_v32", dtype="fp8_e4m3", raw_latents=True)
    _compare_pools(tiny_config("deepseek_v32"), tmp_path, deployment, dsa_decode_backend="trtllm")


def test_an_index_beside_heads_in_fp8_for_kernels_that_read_it_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang.srt.server_args.m3_fp8_attn_gemm_enabled", lambda args: True)
    deployment = deployment_of("minimax_m3_vl", dtype="fp8_e4m3", raw_latents=True)
    _compare_pools(tiny_config("minimax_m3_vl"), tmp_path, deployment)


@pytest.mark.parametrize("model_type", ["internlm2", "llama", "qwen2", "qwen3", "qwen3_moe"])
def test_text_models_below_internvl(model_type: str, tmp_path: Path) -> None:
    text = tiny_config(model_type)
    config = tiny_config("internvl_chat") | {"llm_config": text}
    _compare_pools(config, tmp_path, deployment_of("internvl_chat", tp=2))
    with pytest.raises(SizeError, match="known are"):
        read_shape(config | {"llm_config": text | {"architectures": ["GptOssForCausalLM"]}})


def test_padding_grows_with_the_page(tmp_path: Path) -> None:
    for page_size in (1, 16, 128):
        _compare_pools(tiny_config("gpt_oss"), tmp_path, deployment_of("gpt_oss", page_size=page_size))


_NO_SUCH_READING = {
    ("mamba2", "hidden_size"),  # transformers refuses to read that
    ("minimax_m3_vl", "hidden_size"),  # and sglang this; no size depends on it
    # Its class, which comes with the weights, would fill them in; no size depends on them.
    *((name, value) for name in CLASSES_BESIDE_WEIGHTS for value in ("hidden_size", "vocab_size")),
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_value_left_out_is_asked_for_or_read_as_sglang_reads_it(model_type: str, tmp_path: Path) -> None:
    config = tiny_config(model_type)
    deployment = deployment_of(model_type)
    asked = compared = 0
    for name in text_of(config):
        if name in ("architectures", "vocab_size", "torch_dtype"):
            continue  # Without the first sglang serves nothing; no pool depends on the others.
        without = copy.deepcopy(config)
        del text_of(without)[name]
        try:
            read_shape(without)
        except SizeError:
            asked += 1
            continue
        if (model_type, name) not in _NO_SUCH_READING:
            _compare_pools(without, tmp_path, deployment)
            compared += 1
    # sglang reads the text part of this one without a class that would complete it.
    is_completed = has_text_apart(config) and model_type != "minimax_m3_vl"
    assert compared > 2 if is_completed else asked > 2


PUBLISHED = {
    # google/gemma-3-4b-it and llava-hf/llava-1.5-7b-hf, as published; what the class has is left out.
    "gemma3": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "llava": {"max_position_embeddings": 4096, "model_type": "llama", "vocab_size": 32064},
    "mistral3": {"model_type": "ministral3", "num_hidden_layers": 26, "hidden_size": 3072},
}


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_nested_configs_leave_out_what_their_class_has(model_type: str, tmp_path: Path) -> None:
    config = tiny_config(model_type) | {"text_config": PUBLISHED[model_type]}
    _compare_pools(config, tmp_path, deployment_of(model_type, tp=2))


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_the_text_model_may_lie_outside_or_in_a_part_of_its_own(model_type: str, tmp_path: Path) -> None:
    flat = tiny_config(model_type)
    names = ("model_type", "architectures")
    apart = {name: flat[name] for name in names}
    text = {name: value for name, value in flat.items() if name not in names}
    for config in (flat, apart | {"text_config": text}, apart | {"text_config": text | {"head_dim": 48}}):
        _compare_pools(config, tmp_path, deployment_of(model_type))
    with pytest.raises(SizeError, match="remove it"):  # sglang would not read it
        read_shape(flat | {"head_dim": 48})


@pytest.mark.parametrize("model_type", ["llama", "arcee", "cohere2", "hunyuan_v1_dense"])
def test_without_kv_heads_every_head_has_its_own(model_type: str, tmp_path: Path) -> None:
    config = tiny_config(model_type, num_key_value_heads=None)
    assert read_shape(config).caches[0].geometry == HeadGeometry(8, 64, 64)
    _compare_pools(config, tmp_path, deployment_of(model_type))


# ---- what else is read from a config ----


@pytest.mark.parametrize(
    ("model_type", "changes", "tokens"),
    [
        ("llama", {"rope_scaling": {"type": "linear", "factor": 8.0}}, 4096),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, 1024),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, 1024),
        (
            "llama",
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
            512,
        ),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 8.0, "original_max_position_embeddings": 128}},
            512,
        ),
        ("qwen2", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 512),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 512),
        ("cohere", {"model_max_length": 131072}, 131072),  # as Command R+ has it
        ("gpt_bigcode", {}, 512),
    ],
)
def test_a_context_is_as_long_as_sglang_says(
    model_type: str, changes: dict[str, Any], tokens: int, tmp_path: Path
) -> None:
    config = tiny_config(model_type, **changes)
    with served_with():
        upstream = _upstream(config, tmp_path, deployment_of(model_type)).model_config.context_len
    assert read_shape(config).context == upstream == tokens


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_has_the_context_that_sglang_reads(model_type: str, tmp_path: Path) -> None:
    config = tiny_config(model_type)
    said = read_shape(config).context
    with served_with():
        upstream = _upstream(config, tmp_path, deployment_of(model_type)).model_config.context_len
    assert said in (upstream, None)
    assert said is not None or not {"max_position_embeddings", "n_positions"} & set(config)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("gemma2", {}),
        ("gemma3_text", {}),
        ("gemma3_text", {"sliding_window_pattern": 3}),
        ("gemma3", {}),
        ("cohere2", {}),
        ("cohere2", {"sliding_window_pattern": 2}),
        ("olmo3", {}),
    ],
)
def test_published_configs_without_layer_types_have_the_layers_that_transformers_gives_them(
    model_type: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = tiny_config(model_type)
    part = text_of(config)
    del part["layer_types"]
    part.update(changes | {"num_hidden_layers": 14})
    with served_with():
        text = _upstream(config, tmp_path, deployment_of(model_type)).model_config.hf_text_config
    masked = ["sliding_attention" if cache.reads else "full_attention" for cache in read_shape(config).caches]
    assert masked == text.layer_types
    assert len(set(masked)) == 2


# ---- the arithmetic that divides memory ----

BUDGET = (1 << 22) + 12345


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    "model_type", [name for name in FAMILIES if name not in ("mamba", "mamba2", "falcon_mamba")]
)
def test_as_many_tokens_fit_as_sglang_says(model_type: str, tp: int, tmp_path: Path) -> None:
    config, deployment = tiny_config(model_type), deployment_of(model_type, tp=tp)
    shape = read_shape(config)
    parts = stages(shape, deployment)
    with served_with(attention_tp=tp, page_size=deployment.page_size, max_running_requests=None):
        upstream = _upstream(config, tmp_path, deployment)
        budget = float(BUDGET)
        if shape.states:
            budget = upstream.configurator._handle_max_mamba_cache(BUDGET / (1 << 30)) * (1 << 30)
            assert upstream.configurator._calculate_mamba_ratio() == Division().state_slots
            states = upstream.max_states
        says = upstream.arithmetic.calculate_pool_sizes(round(budget), deployment.page_size)
    held = fit(shape, parts, deployment, BUDGET, 64, Division())
    assert held.full_tokens == says.max_total_num_tokens
    if shape.has_windows:
        assert held.window_tokens == says.swa_max_total_num_tokens
    if shape.states:
        assert held.states == states


@pytest.mark.parametrize(
    "model_type", ["llama", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "gpt_oss", "gemma4"]
)
@pytest.mark.parametrize("draft_layers", [1, 3])
def test_drafts_take_what_sglang_reserves_for_them(
    model_type: str, draft_layers: int, tmp_path: Path
) -> None:
    config = tiny_config(model_type)
    deployment = deployment_of(model_type, tp=2, draft_layers=draft_layers)
    shape = read_shape(config)
    (stage,) = stages(shape, deployment)
    with served_with(attention_tp=2, page_size=deployment.page_size):
        cell = _upstream(config, tmp_path, deployment).arithmetic._cell_size  # type: ignore[attr-defined]
    ours = stage.full.total() + stage.draft.total() + Division().window_ratio * stage.window.total()
    assert math.isclose(ours, cell, abs_tol=1e-6)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_request_holds_as_much_of_a_window_as_sglang_grants(page_size: int) -> None:
    from sglang.srt.model_executor.pool_configurator import compute_swa_request_cap

    with served_with(page_size=page_size, chunked_prefill_size=0):
        two, one = (
            compute_swa_request_cap(
                page_size=page_size, window=WINDOW, attn_dp_size=1, max_running_requests=many
            )
            for many in (2, 1)
        )
    assert window_slots(WINDOW, 10**6, page_size) == -(-(two - one) // page_size) * page_size
    assert window_slots(WINDOW, 17, page_size) == -(-17 // page_size) * page_size


# ---- that the tests can fail ----


@pytest.mark.parametrize(
    ("model_type", "name", "wrong"),
    [
        ("llama", "num_key_value_heads", 2),
        ("deepseek_v3", "kv_lora_rank", 256),
        ("gpt_oss", "layer_types", ["sliding_attention"] * 3 + ["full_attention"]),
        ("qwen3_next", "linear_conv_kernel_dim", 3),
        ("nemotron_h", "n_groups", 8),
    ],
)
def test_another_config_has_other_bytes(model_type: str, name: str, wrong: Any, tmp_path: Path) -> None:
    deployment = deployment_of(model_type)
    (stage,) = stages(read_shape(tiny_config(model_type, **{name: wrong})), deployment)
    with served_with(page_size=deployment.page_size, max_running_requests=4):
        built = _upstream(tiny_config(model_type), tmp_path, deployment).allocated(FULL, WINDOWED, STATES)
    assert +stage.pool_bytes(deployment, FULL, WINDOWED, STATES) != built

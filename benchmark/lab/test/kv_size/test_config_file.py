"""Configs that nobody vouches for: a size that sglang would have, or one line that names the cure."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance_lab.kv_size.cache_dtype import BFLOAT16
from sgl_importance_lab.kv_size.config_file import bundled_names, bundled_shapes, load_shape, read_shape
from sgl_importance_lab.kv_size.deployment import Deployment, stages
from sgl_importance_lab.kv_size.families import FAMILIES
from sgl_importance_lab.kv_size.fields import SizeError
from sgl_importance_lab.kv_size.model_shape import ModelShape

from support.workloads.kv_configs import page_size_of, text_of, tiny_config

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@given(json_values)
def test_any_json_is_read_or_refused_in_one_line(config: Any) -> None:
    _read_or_refuse(config)


@given(st.sampled_from(sorted(FAMILIES)), st.data())
def test_a_config_with_anything_in_it_is_read_or_refused(model_type: str, data: st.DataObject) -> None:
    config = copy.deepcopy(tiny_config(model_type))
    part = text_of(config) if data.draw(st.booleans()) else config
    for name in data.draw(st.lists(st.sampled_from(sorted(part)), min_size=1, max_size=3, unique=True)):
        part[name] = data.draw(json_values | st.integers(0, 300))
    shape = _read_or_refuse(config)
    if shape is None:
        return
    for tp in (1, 2, 7):
        try:
            (stage,) = stages(shape, Deployment(BFLOAT16, page_size=page_size_of(model_type), tp=tp))
        except SizeError as error:
            _check_line(error)
        else:
            assert stage.fixed_bytes(Deployment(BFLOAT16)) >= 0
            assert all(
                type(size) is int and size >= 0
                for size in stage.pool_bytes(Deployment(BFLOAT16), 64).values()
            )


def _read_or_refuse(config: Any) -> ModelShape | None:
    try:
        return read_shape(config)
    except SizeError as error:
        _check_line(error)
        return None


CURES = ("add", "choose", "correct", "guessed", "known are", "must", "name", "needed", "remove", "take")


def _check_line(error: SizeError) -> None:
    line = str(error)
    assert line
    assert line.isprintable()
    cures = (
        "add",
        "correct",
        "needed",
        "name",
        "choose",
        "take",
        "give",
        "must",
        "write",
        "remove",
        "known are",
        "guessed",
    )
    assert any(cure in line for cure in cures), line


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "deepseek_v9"}, "is not guessed"),
        ({"model_type": "deepseek_v4"}, "is not guessed: its rings"),
        ({"model_type": "whisper"}, "is not guessed: tokens of its encoder"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "known are LlamaForCausalLM"),
        ({"architectures": []}, "must name LlamaForCausalLM"),
        ({"num_attention_heads": None}, "has no num_attention_heads"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"num_key_value_heads": "4"}, "a whole number from 1"),
        ({"num_key_value_heads": True}, "a whole number from 1"),
        ({"num_hidden_layers": 10**9}, "from 1 to 4096"),
        ({"head_dim": 1.5}, "a whole number from 1"),
        ({"is_hybrid_swa": True}, "remove it"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SizeError, match=said):
        read_shape(tiny_config("llama") | changes)


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("gemma2", {"layer_types": ["full_attention"] * 3}, "3 words in layer_types, for 4 layers"),
        ("gemma2", {"layer_types": ["chunked"] * 4}, "known are full_attention, sliding_attention"),
        ("gemma3n_text", {"num_kv_shared_layers": 8}, "finds no K and V of its type"),
        ("gemma3n_text", {"num_kv_shared_layers": 9}, "larger than the 8 layers"),
        ("deepseek_v32", {"index_head_dim": 64}, "must be 128"),
        ("deepseek_v3", {"index_topk": 64}, "has no index_head_dim"),
        ("qwen3_next", {"layer_types": ["full_attention"] * 4}, "correct layer_types"),
        ("nemotron_h", {"hybrid_override_pattern": "M?"}, "other letters"),
        ("nemotron_h", {"hybrid_override_pattern": "--"}, "keeps anything"),
        ("kimi_linear", {"linear_attn_config": 3}, "an object is needed"),
        ("granitemoehybrid", {"mamba_d_head": 3}, "correct one"),
        ("lfm2", {"conv_L_cache": 1}, "from 2 to"),  # nothing would be kept, and divided by
        ("mimo_v2_flash", {"hybrid_layer_pattern": [0, 1, 2, 0]}, "from 0 to 1"),
    ],
)
def test_what_is_wrong_with_a_family_is_named(model_type: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SizeError, match=said):
        read_shape(tiny_config(model_type, **changes))


def test_a_class_that_names_no_architecture_has_that_of_its_type() -> None:
    config = tiny_config("llama")
    for absent in ({}, {"architectures": None}):
        assert read_shape({k: v for k, v in config.items() if k != "architectures"} | absent) == read_shape(
            config
        )


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "bfloat16"),  # DeepSeek-V3
        ({"quant_method": "mxfp4"}, "bfloat16"),  # gpt-oss
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, None),
        ({"quant_method": "fp8", "kv_cache_quant_algo": "FP8"}, None),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, None),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, "bfloat16"),
        ({}, None),
    ],
)
def test_only_a_quantization_of_weights_alone_leaves_the_dtype(
    quantization: dict[str, Any], dtype: str | None
) -> None:
    assert read_shape(tiny_config("deepseek_v3", quantization_config=quantization)).dtype == dtype


def test_what_says_no_dtype_or_float32_is_served_in_16_bits(tmp_path: Path) -> None:
    """As sglang's ``_get_and_verify_dtype`` has it; ModelOpt's file beside a config may say otherwise."""
    from support.drivers.upstream_pools import dtype_of

    for model_type in ("llama", "gemma2"):
        for dtype in (None, "float32", "float16", "bfloat16"):
            config = tiny_config(model_type, torch_dtype=dtype)
            assert f"torch.{read_shape(config).dtype}" == str(dtype_of(config, tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama")))
    assert load_shape(str(tmp_path)).dtype == "bfloat16"
    (tmp_path / "hf_quant_config.json").write_text("{}")
    assert load_shape(str(tmp_path)).dtype is None


def test_a_text_model_of_another_type_is_not_guessed() -> None:
    config = tiny_config("llava") | {"text_config": {"model_type": "gemma2"}}
    with pytest.raises(SizeError, match="has model_type 'gemma2', which is not checked there"):
        read_shape(config)


def test_a_folder_a_file_and_a_name(tmp_path: Path) -> None:
    config = next(each.config for each in bundled_shapes() if each.name == "llama-3.1-8b")
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("llama-3.1-8b", str(tmp_path), str(tmp_path / "config.json")):
        assert load_shape(name) == read_shape(config)
    for name in ("", "llama-9", str(tmp_path / "nothing.json")):
        with pytest.raises(SizeError, match="models known by name are deepseek-v3"):
            load_shape(name)
    (tmp_path / "config.json").write_bytes(b"\xff{")
    with pytest.raises(SizeError, match=r"name a config\.json"):
        load_shape(str(tmp_path))


@pytest.mark.parametrize("name", bundled_names())
def test_bundled_shapes_have_a_source_that_says_so(name: str) -> None:
    """What cites a class of transformers has its numbers; what cites a file names one version of it."""
    shape = next(each for each in bundled_shapes() if each.name == name)
    read_shape(shape.config)
    words = shape.source.split()
    if words[0] != "defaults":
        assert words[0].startswith("https://github.com/")
        assert len(words[0].split("/blob/")[1].split("/")[0]) == 40, "a commit, not a branch"
        return
    from sglang_importance import cpu

    cpu.activate()  # torchvision lacks an operator on a CPU
    import transformers

    class_name = words[2].removeprefix("transformers.").rstrip(",")
    defaults = getattr(transformers, class_name)()
    config = shape.config.get("text_config", shape.config)
    ours = {"architectures", "dtype", "full_attention_interval", "model_type"}
    assert config["model_type"] == defaults.model_type
    assert {key: value for key, value in config.items() if key not in ours} == {
        key: getattr(defaults, key) for key in config if key not in ours
    }


def test_a_dtype_may_be_spelled_as_torch_does_or_left_to_the_weights() -> None:
    spelled = {"torch.bfloat16": "bfloat16", "auto": None, "half": "float16", "torch.float": "float16"}
    for dtype, expected in {**spelled, "torch.float8_e4m3fn": None, "BFLOAT16": None}.items():
        assert read_shape(tiny_config("llama", torch_dtype=dtype)).dtype == expected


def test_an_fp8_cache_of_modelopt_is_taken(tmp_path: Path) -> None:
    quantization = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    assert read_shape(tiny_config("llama", quantization_config=quantization)).dtype == "fp8_e4m3"
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama")))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    assert load_shape(str(tmp_path)).dtype == "fp8_e4m3"

"""Deployments that sglang would not serve."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_importance_lab.kv_size.config_file import read_shape
from sgl_importance_lab.kv_size.deployment import stages
from sgl_importance_lab.kv_size.fields import SizeError

from support.workloads.kv_configs import deployment_of, tiny_config


@pytest.mark.parametrize(
    ("model_type", "settings", "cure"),
    [
        ("deepseek_v32", {"page_size": 16}, "--page-size 64"),
        ("deepseek_v32", {"dtype": "fp8_e5m2"}, "take bfloat16 or fp8_e4m3"),
        ("deepseek_v3", {"dtype": "mxfp8"}, "take fp8_e4m3"),
        ("gpt_oss", {"dtype": "nvfp4"}, "take fp8_e4m3"),
        ("minimax_m3_vl", {"dtype": "mxfp8"}, "take fp8_e4m3"),
        ("minimax_m3_vl", {"draft_layers": 1}, "leave out --draft-layers"),
        ("mimo_v2_flash", {"dtype": "fp4_mx_block16"}, "take fp8_e4m3"),
        ("kimi_linear", {"dtype": "nvfp4"}, "take fp8_e4m3"),
        ("llama", {"tp": 3}, "choose --tp"),
        ("llama", {"tp": 4, "dp_attention": 3}, "choose one that does"),
        ("llama", {"pp": 5}, "choose a smaller one"),
        ("llama", {"dtype": "nvfp4", "page_size": 2}, "--page-size 16"),
        ("llama", {"raw_latents": True}, "leave it out"),
        ("qwen3_next", {"draft_layers": 1}, "leave out --draft-layers"),
        ("qwen3_next", {"tp": 16}, "choose"),
    ],
)
def test_what_sglang_would_not_serve_is_refused(model_type: str, settings: dict[str, Any], cure: str) -> None:
    with pytest.raises(SizeError, match=cure):
        stages(read_shape(tiny_config(model_type)), deployment_of(model_type, **settings))

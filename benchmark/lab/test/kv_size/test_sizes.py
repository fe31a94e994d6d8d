"""What is said of known models: numbers that others have published, and what must hold of any."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from sgl_importance_lab.kv_size.cache_dtype import cache_dtype
from sgl_importance_lab.kv_size.capacity import Division, fit
from sgl_importance_lab.kv_size.cli import app
from sgl_importance_lab.kv_size.config_file import bundled_names, load_shape
from sgl_importance_lab.kv_size.deployment import SPARSE_PAGE, Deployment, stages
from sgl_importance_lab.kv_size.fields import SizeError
from sgl_importance_lab.kv_size.sizes import Sizes, size
from sgl_importance_lab.kv_size.tier_costs import TierSize, parse_tier, stored_request_bytes


def _size(name: str, context: int = 8192, dtype: str = "bfloat16", **settings: Any) -> Sizes:
    shape = load_shape(name)
    page_size = settings.pop("page_size", SPARSE_PAGE if shape.is_sparse else 16)
    return size(shape, Deployment(cache_dtype(dtype), page_size=page_size, **settings), context)


@pytest.mark.parametrize(
    ("name", "settings", "bytes_per_token", "on_a_gpu"),
    [
        # 2 x 8 heads x 128 x 80 layers x 2 bytes, as in Meta's own card of the model.
        ("llama-3.1-70b", {}, 327_680, 327_680),
        ("llama-3.1-70b", {"tp": 8}, 327_680, 40_960),
        ("llama-3.1-70b", {"tp": 16}, 327_680, 40_960),  # each head on two GPUs
        ("llama-3.1-70b", {"tp": 16, "dp_attention": 4}, 327_680, 81_920),
        ("llama-3.1-70b", {"tp": 2, "pp": 3}, 327_680, 27 * 2048),
        # 61 layers of 512 + 64, which DeepSeek gives as 70 KB a token (arXiv 2505.09343, table 1).
        ("deepseek-v3", {}, 70_272, 70_272),
        ("deepseek-v3", {"tp": 8}, 70_272, 70_272),
        ("deepseek-v3", {"dtype": "nvfp4"}, 61 * (288 + 36), 61 * (288 + 36)),
        # 656 and 132 bytes of a layer, as in DeepSeek's FlashMLA and DeepGEMM.
        ("deepseek-v3.2", {"dtype": "fp8_e4m3"}, 61 * (656 + 132), 61 * (656 + 132)),
        ("deepseek-v3.2", {"dtype": "fp8_e4m3", "raw_latents": True}, 61 * (576 + 132), 61 * (576 + 132)),
        ("deepseek-v3.2", {"dtype": "fp8_e4m3", "draft_layers": 1}, 62 * 788, 62 * 788),
        # The same paper: 516 KB a token for a Llama of 405 billion parameters.
        ("llama-3.1-405b", {}, 516_096, 516_096),
    ],
)
def test_published_sizes(name: str, settings: dict[str, Any], bytes_per_token: int, on_a_gpu: int) -> None:
    sizes = _size(name, **settings)
    assert (sizes.bytes_per_token, sizes.bytes_per_token_per_gpu) == (bytes_per_token, on_a_gpu)


def test_sizing_as_mha_is_wrong_by_as_much_as_was_claimed_only_in_part() -> None:
    """57 is K and V of 128 a head beside a latent, on one GPU; but keys have 192, and GPUs share heads."""
    alone = _size("deepseek-v3")
    assert alone.mha_bytes_per_token_per_gpu == 61 * 128 * (192 + 128) * 2
    assert alone.mha_bytes_per_token_per_gpu / alone.bytes_per_token_per_gpu == pytest.approx(71.1, abs=0.05)
    assert 61 * 2 * 128 * 128 * 2 / alone.bytes_per_token == pytest.approx(56.9, abs=0.05)
    shared = _size("deepseek-v3", tp=8)
    assert shared.mha_bytes_per_token_per_gpu is not None
    assert shared.mha_bytes_per_token_per_gpu / shared.bytes_per_token_per_gpu == pytest.approx(8.9, abs=0.05)


def test_the_last_page_is_a_requests_own() -> None:
    page = 64
    sizes = {
        context: _size("llama-3.1-8b", context, page_size=page).bytes_per_request for context in (1, 64, 65)
    }
    assert sizes[1] == sizes[64] == 64 * 131_072
    assert sizes[65] == 128 * 131_072


def test_a_window_keeps_a_request_small_where_it_has_a_pool() -> None:
    pooled, masked = _size("gpt-oss-120b", 100_000), _size("gemma-2-27b", 8192)
    # Nine times the context, and the windows' layers keep the same.
    windows = {
        context: _size("gpt-oss-120b", context).kinds[0].bytes_per_request for context in (10_000, 90_000)
    }
    assert windows[10_000] == windows[90_000]
    assert pooled.kinds[0].window == 127
    # Masked only: half of the layers keep 4,096 tokens that they never read again.
    assert masked.kinds[0].unread_bytes_per_request == masked.kinds[0].bytes_per_token * (8192 - 4096)


def test_shared_layers_are_allocated_and_never_read() -> None:
    sizes = _size("gemma-3n-e4b", 8192)
    shared = [kind for kind in sizes.kinds if kind.kind.startswith("shared")]
    assert sum(kind.layers for kind in shared) == 15
    assert all(kind.unread_bytes_per_request == kind.bytes_per_request > 0 for kind in shared)


@given(
    name=st.sampled_from(bundled_names()),
    budget=st.integers(1, 10**12),
    context=st.integers(1, 200_000),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.integers(1, 3),
    page_size=st.sampled_from([1, 16, 128]),
)
def test_what_fits_fits(name: str, budget: int, context: int, tp: int, pp: int, page_size: int) -> None:
    shape = load_shape(name)
    page_size = SPARSE_PAGE if shape.is_sparse else page_size
    deployment = Deployment(cache_dtype("bfloat16"), page_size=page_size, tp=tp, pp=pp)
    try:
        parts = stages(shape, deployment)
        held = fit(shape, parts, deployment, budget, context, Division())
    except SizeError:
        return
    for stage in parts:
        taken = stage.pool_bytes(deployment, held.full_tokens or 0, held.window_tokens or 0, held.states or 0)
        # The configurator leaves the padding of token pools out of its sum, and that of states in it.
        padding = stage.fixed_bytes(deployment) - stage.state.total()
        assert taken.total() - padding <= budget
    assert held.requests * context <= (
        held.full_tokens if held.full_tokens is not None else held.requests * context
    )


@given(
    st.sampled_from(bundled_names()), st.sampled_from([1, 2, 4, 8]), st.integers(1, 3), st.integers(1, 4096)
)
def test_gpus_together_hold_every_byte_and_its_copies(name: str, tp: int, pp: int, context: int) -> None:
    shape = load_shape(name)
    page = SPARSE_PAGE if shape.is_sparse else 1
    once = Deployment(cache_dtype("bfloat16"), page_size=page)
    spread = Deployment(cache_dtype("bfloat16"), page_size=page, tp=tp, pp=pp)
    try:
        parts = stages(shape, spread)
    except SizeError:
        return
    alone = size(shape, once, context)
    stored = stored_request_bytes(parts, spread, context, per_rank=True)
    copied = sum(kind.bytes_per_request * layer_copies(shape, tp, kind.kind) for kind in alone.kinds)
    if shape.states and tp > 1:
        assert stored >= copied  # B and C of a group lie on each of its GPUs.
    else:
        assert stored == copied


def layer_copies(shape: Any, tp: int, kind: str) -> int:
    """By hand: latents everywhere, heads where there are fewer than GPUs."""
    if "latent" in kind:
        return tp
    if "state" in kind:
        return 1
    heads = next(cache.geometry.kv_heads for cache in shape.attention)
    return max(1, tp // heads)


def test_storage_keeps_a_latent_once_and_a_head_from_every_rank() -> None:
    deployment = Deployment(cache_dtype("bfloat16"), tp=16)
    for name, copies in (("deepseek-v3", 1), ("llama-3.1-70b", 2)):
        shape = load_shape(name)
        parts = stages(shape, deployment)
        below = stored_request_bytes(parts, deployment, 1000, per_rank=False)
        assert below == copies * size(shape, Deployment(cache_dtype("bfloat16")), 1000).bytes_per_request


def test_money_by_hand() -> None:
    shape = load_shape("llama-3.1-8b")
    deployment = Deployment(cache_dtype("bfloat16"))
    (found,) = size(
        shape, deployment, 1000, tiers=[TierSize("nvme", 1000.0, 0.05)], million_computed=0.1
    ).tiers
    assert found.request_bytes == 131_072_000
    assert found.requests == 7629
    assert found.tokens == 7_629_000
    assert found.million_tokens_month == pytest.approx(131.072 * 0.05)
    assert found.break_even_hours == pytest.approx(0.1 / (131.072 * 0.05) * 730)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host=",
        "=3",
        "host=x",
        "host=1@",
        "host=-1",
        "host=nan",
        "host=inf",
        "host=1@-1",
        "device=1",
    ],
)
def test_tiers_that_are_none(text: str) -> None:
    with pytest.raises(SizeError, match="--tier"):
        parse_tier(text)


# ---- the command ----


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_json_has_what_programs_ask_for() -> None:
    arguments = (
        "--tp",
        4,
        "--gpu-memory",
        80,
        "--weights",
        35,
        "--tier",
        "host=256@0.5",
        "--price-computed",
        0.2,
    )
    result = _run("llama-3.1-70b", *arguments, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    assert document["bytes_per_token"] == 327_680
    assert document["bytes_per_token_per_gpu"] == 81_920
    assert document["bytes_per_request"] == 8192 * 327_680
    assert document["fixed_bytes"] == 327_680
    assert [(kind["kind"], kind["layers"]) for kind in document["layers"]] == [("full attention", 80)]
    assert document["capacity"]["full_tokens"] == int((80 * 0.9 - 35) * 1e9) // 81_920
    assert [tier["name"] for tier in document["tiers"]] == ["device", "host"]
    assert document["tiers"][0]["requests"] == document["capacity"]["requests"]
    assert (
        document["mha_requests"] * 8 <= document["capacity"]["requests"] < (document["mha_requests"] + 1) * 8
    )


def test_tables_say_what_fits() -> None:
    result = _run("gemma-3n-e4b", "--gpu-memory", 24, "--weights", 16, "--tier", "nvme=1000@0.05")
    assert result.exit_code == 0, result.output
    for words in (
        "shared masked window attention",
        "never read",
        "padding",
        "nvme",
        "runs out first",
        "Sized as MHA",
    ):
        assert words in result.output, words
    assert "deepseek-v3.2" in _run("--list").output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name a model of --list"),
        (("no-such-model",), "models known by name are"),
        (("llama-3.1-8b", "--dtype", "int3"), "unknown --dtype int3"),
        (("llama-3.1-8b", "--tp", 3), "choose --tp"),
        (("deepseek-v3.2",), "give --dtype"),
        (("llama-2-7b", "--context", 4000), "choose a smaller one"),
        (("llama-3.1-8b", "--gpu-memory", 10, "--weights", 10), "less --weights"),
        (("qwen3-next-80b-a3b", "--gpu-memory", 0.1), "larger --tp"),
        (("llama-3.1-8b", "--gpu-memory", 0.001, "--page-size", 512), "larger --tp"),
        (("llama-3.1-8b", "--tier", "host"), "such as host=512@0.5"),
    ],
)
def test_errors_are_one_line_with_a_cure(arguments: tuple[object, ...], said: str) -> None:
    result = _run(*arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1

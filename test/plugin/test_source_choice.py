"""``auto`` takes a producer of page scores where it has run, else none, and says so."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.observation_options import SignalOptions
from sgl_importance.options.placement_options import StoreOptions
from sgl_importance.options.tiered_options import SparseOptions, TieredOptions
from sglang_importance.attention.score_sources import (
    HAS_RUN_ON,
    PRODUCERS,
    SOURCES,
    UNPROVEN,
    automatic_source,
)
from sglang_importance.launch.source_choice import settle_source
from sglang_importance.upstream.refusal import LaunchRefused
from sglang_importance.upstream.server_options import attention_backends

OBSERVE = ImportanceOptions(policy="observe")


def resolved(device: str, backend: str, **phases: str | None) -> Any:
    return SimpleNamespace(
        **{
            "device": device,
            "attention_backend": backend,
            "prefill_attention_backend": None,
            "decode_attention_backend": None,
            **phases,
        }
    )


def test_every_producer_says_where_it_has_run() -> None:
    assert HAS_RUN_ON.keys() == PRODUCERS.keys()
    assert all(HAS_RUN_ON.values())
    assert set(UNPROVEN).isdisjoint(PRODUCERS)
    assert {"auto", "none"} <= set(SOURCES)


@pytest.mark.parametrize(
    ("device", "backends", "source"),
    [
        ("cpu", {"torch_native"}, "torch_native"),
        ("cuda", {"torch_native"}, "none"),
        ("cpu", {"intel_amx"}, "none"),
        ("cuda", {"fa3"}, "none"),
        ("cpu", {"torch_native", "triton"}, "none"),
    ],
)
def test_auto_is_a_producer_that_has_run_on_the_device(device: str, backends: set[str], source: str) -> None:
    assert automatic_source(device, backends) == source


def test_each_phase_may_have_a_backend_of_its_own() -> None:
    assert attention_backends(resolved("cuda", "fa3")) == {"fa3"}
    assert attention_backends(resolved("cuda", "fa3", decode_attention_backend="flashinfer")) == {
        "fa3",
        "flashinfer",
    }
    assert attention_backends(SimpleNamespace()) == set()


def test_a_producer_found_is_nothing_to_speak_of(caplog: pytest.LogCaptureFixture) -> None:
    assert settle_source(resolved("cpu", "torch_native"), OBSERVE).source == "torch_native"
    assert caplog.text == ""


def test_tokens_that_read_all_pages_are_scored_beside_a_selector(caplog: pytest.LogCaptureFixture) -> None:
    sparse = ImportanceOptions(
        policy="importance",
        signal=SignalOptions(g="on"),
        tiered=TieredOptions(residency="tiered"),
        sparse=SparseOptions(selector="bits"),
    )
    assert settle_source(resolved("cpu", "torch_native"), sparse).source == "torch_native"
    assert caplog.text == ""
    assert settle_source(resolved("cuda", "triton"), replace(sparse, signal=SignalOptions())).source == "none"


def test_none_is_said_in_one_line_with_what_could_be_tried(caplog: pytest.LogCaptureFixture) -> None:
    assert settle_source(resolved("cuda", "triton"), OBSERVE).source == "none"
    (record,) = caplog.records
    assert record.getMessage() == (
        "KV importance: no page scores (--kv-importance-source none): no producer of them has run beside "
        "attention backend triton on cuda; reuse is predicted all the same. Hardly run on a GPU, for "
        "trials: --kv-importance-source qk_probe, triton"
    )


def test_what_nothing_can_be_tried_beside_names_nothing(caplog: pytest.LogCaptureFixture) -> None:
    settle_source(resolved("cuda", "trtllm_mha"), OBSERVE)
    assert caplog.records[0].getMessage().endswith("reuse is predicted all the same")


@pytest.mark.parametrize("source", [*PRODUCERS, *UNPROVEN, "none"])
def test_a_source_that_was_named_stays(source: str, caplog: pytest.LogCaptureFixture) -> None:
    options = ImportanceOptions(policy="importance", source=source)
    assert settle_source(resolved("cuda", "fa3"), options) is options
    assert caplog.text == ""


def test_stock_with_a_store_needs_no_source() -> None:
    options = ImportanceOptions(store=StoreOptions(directory="pages"))
    assert settle_source(resolved("cuda", "fa3"), options) is options


@pytest.mark.parametrize(
    ("options", "need"),
    [
        ({"signal.g": "on"}, "signal.g of --kv-importance-config 'on'"),
        ({"signal.g": "shuffled"}, "signal.g of --kv-importance-config 'shuffled'"),
        (
            {"trace.directory": "records", "trace.detail": "steps"},
            "trace.detail of --kv-importance-config 'steps'",
        ),
    ],
)
def test_what_rests_on_scores_is_refused_without_them(options: dict[str, Any], need: str) -> None:
    with pytest.raises(ValueError, match=f"^{need} needs page scores, which --kv-importance-source 'none'"):
        ImportanceOptions.of({"policy": "importance", "source": "none", **options})
    with pytest.raises(LaunchRefused) as refused:
        settle_source(resolved("cuda", "fa3"), ImportanceOptions.of({"policy": "importance", **options}))
    (line,) = refused.value.reasons
    assert line.startswith(f"{need} needs page scores, and no producer of them has run beside")
    assert "attention backend fa3 on cuda: drop it, or name" in line
    here = settle_source(
        resolved("cpu", "torch_native"), ImportanceOptions.of({"policy": "importance", **options})
    )
    assert here.source == "torch_native"


@pytest.mark.parametrize("options", [{}, {"trace.directory": "records"}])
def test_the_rest_needs_no_scores(options: dict[str, Any]) -> None:
    assert ImportanceOptions.of({"policy": "importance", "source": "none", **options}).needing_scores == ()


@pytest.mark.parametrize(
    "mode", [{"speculative_algorithm": "EAGLE"}, {"kv_cache_dtype": "fp8_e4m3"}], ids=str
)
def test_modes_whose_attention_nobody_has_read_go_without_scores(
    mode: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    args = resolved("cpu", "torch_native", **mode)
    assert settle_source(args, OBSERVE).source == "none"
    (line,) = caplog.messages
    ((flag, value),) = mode.items()
    assert f"(--{flag.replace('_', '-')} {value}); reuse is predicted all the same" in line
    with pytest.raises(LaunchRefused, match=r"drop it$"):
        settle_source(args, ImportanceOptions(policy="importance", signal=SignalOptions(g="on")))

"""Every mode that is not on the tested list is refused, in one line that names the cure."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import ServerArgs

from sgl_importance.options.importance_options import ImportanceOptions, name_of
from sgl_importance.options.observation_options import TraceOptions
from sgl_importance.options.placement_options import LedgerOptions
from sgl_importance.options.tiered_options import TieredOptions
from sglang_importance.attention.score_sources import PRODUCERS, UNPROVEN
from sglang_importance.launch.modes.arguments import RULES, check_modes, refusals
from sglang_importance.launch.modes.rule import FP8, PAIRED_KEYS, SPECULATION, Rule
from sglang_importance.launch.modes.tiered_pages import page_list_refusals
from sglang_importance.upstream.refusal import LaunchRefused

IMPORTANCE = ImportanceOptions(policy="importance")
OBSERVE = ImportanceOptions(policy="observe")

# A value that switches each mode on; True where none is given.
MODE_ON: dict[str, Any] = {
    **dict.fromkeys(("pp_size", "dcp_size", "attn_cp_size"), 2),
    **dict.fromkeys(("moe_dp_size", "dwdp_size", "nnodes"), 2),
    "elastic_ep_backend": "mooncake",
    "disaggregation_decode_retraction_backup": "host_pool",
    "decoupled_spec_role": "drafter",
    "grpc_port": 50051,
    "speculative_algorithm": "DFLASH",
    "dllm_algorithm": "LowConfidence",
    "model_impl": "transformers",
    "radix_cache_backend": "flexkv",
    "radix_eviction_policy": "slru",
    "radix_eviction_policy_config": {"protected_threshold": 4},
    "hicache_host_memory_mode": "buffer_only",
    "hicache_storage_backend": "mooncake",
    "kv_cache_dtype": "mxfp8",
    "device": "npu",
}


def _refused_policy(rule: Rule) -> ImportanceOptions:
    return ImportanceOptions(policy=rule.policies[-1])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.field)
def test_each_rule_reads_a_field_of_sglang_and_allows_its_default(rule: Rule) -> None:
    assert rule.field in {field.name for field in msgspec.structs.fields(ServerArgs)}
    assert not rule.refuses(getattr(ServerArgs(model_path="dummy"), rule.field))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.field)
def test_each_mode_is_refused_in_one_line_with_the_cure(rule: Rule) -> None:
    args = ServerArgs(model_path="dummy")
    setattr(args, rule.field, MODE_ON.get(rule.field, True))
    options = _refused_policy(rule)
    with pytest.raises(LaunchRefused) as refused:
        check_modes(args, options)
    (line,) = refused.value.reasons
    assert line.startswith(f"--kv-policy {options.policy} does not support {rule.mode} ({rule.flag}")
    assert rule.flag in line.split("): ")[1]
    assert line.endswith(", or use --kv-policy default")
    assert "\n" not in line
    check_modes(args, ImportanceOptions())


@pytest.mark.parametrize("options", [IMPORTANCE, OBSERVE], ids=lambda options: options.policy)
def test_what_has_been_tested_is_allowed(options: ImportanceOptions) -> None:
    args = ServerArgs(
        model_path="dummy",
        device="cpu",
        attention_backend="torch_native",
        page_size=64,
        chunked_prefill_size=128,
        enable_hierarchical_cache=True,
        hicache_write_policy="write_back",
        hicache_storage_backend="file",
        radix_cache_backend="importance",
        disable_overlap_schedule=True,
        tp_size=2,
        ep_size=2,
        enable_mixed_chunk=True,
        num_continuous_decode_steps=2,
        enable_lora=True,
        lora_paths={"a": "b"},
        tokenizer_worker_num=4,
        kv_events_config='{"publisher": "zmq"}',
    )
    assert refusals(args, options) == []


UNSCORED = [{"speculative_algorithm": algorithm} for algorithm in SPECULATION]
UNSCORED += [{"kv_cache_dtype": dtype} for dtype in FP8]


@pytest.mark.parametrize("mode", UNSCORED, ids=lambda mode: next(iter(mode.values())))
def test_modes_without_page_scores(mode: dict[str, str]) -> None:
    args = ServerArgs(model_path="dummy", attention_backend="triton", page_size=16, **mode)
    for source in ("auto", "none"):
        assert refusals(args, ImportanceOptions(policy="importance", source=source)) == []
    (line,) = refusals(args, ImportanceOptions(policy="importance", source="triton"))
    (value,) = mode.values()
    assert f" {value}): use --kv-importance-source none, or use" in line
    (line,) = refusals(args, ImportanceOptions(policy="importance", tiered=TieredOptions(residency="tiered")))
    assert line.startswith("--kv-residency tiered does not support ")
    native = ServerArgs(model_path="dummy", attention_backend="torch_native", device="cpu", **mode)
    (line,) = page_list_refusals(
        native, ImportanceOptions(policy="observe", trace=TraceOptions(directory="x", pages=1))
    )
    assert line.endswith("drop trace.pages of --kv-importance-config, or use --kv-policy default")


@pytest.mark.parametrize("algorithm", SPECULATION)
@pytest.mark.parametrize("kept", [{"ledger.place": "/ledger"}, {"trace.directory": "/trace"}])
def test_what_is_kept_by_plain_pages_is_refused_beside_keys_of_pairs(
    algorithm: str, kept: dict[str, str]
) -> None:
    args = ServerArgs(model_path="dummy", speculative_algorithm=algorithm)
    lines = refusals(args, ImportanceOptions.of({"policy": "importance", **kept}))
    assert len(lines) == (algorithm in PAIRED_KEYS)
    assert all(f"drop {name_of(next(iter(kept)))}" in line for line in lines)


def test_prefill_and_decode_apart() -> None:
    prefill = ServerArgs(model_path="dummy", disaggregation_mode="prefill")
    assert refusals(prefill, IMPORTANCE) == []
    decode = ServerArgs(model_path="dummy", disaggregation_mode="decode")
    (line,) = refusals(decode, IMPORTANCE)
    assert "without radix cache (--disaggregation-mode decode): add --disaggregation-decode-enable" in line
    decode.disaggregation_decode_enable_radix_cache = True
    assert refusals(decode, IMPORTANCE) == []
    for args in (prefill, decode):
        kept = ImportanceOptions(
            policy="importance", ledger=LedgerOptions(place="/ledger"), trace=TraceOptions(directory="/trace")
        )
        lines = refusals(args, kept)
        assert [line.partition(" or ")[0].rpartition(": ")[2] for line in lines] == [
            "drop --kv-importance-ledger,",
            "drop --kv-importance-trace,",
        ]


def test_replicas_apart_want_a_port_each() -> None:
    behind = {"model_path": "dummy", "tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
    assert refusals(ServerArgs(**behind), IMPORTANCE) == []
    apart = {"model_path": "dummy", "dp_size": 2}
    assert refusals(ServerArgs(**apart), IMPORTANCE) == []
    assert refusals(ServerArgs(**behind, nccl_port=20000), IMPORTANCE) == []
    (line,) = refusals(ServerArgs(**apart, nccl_port=20000), IMPORTANCE)
    assert line == "--nccl-port 20000 is one port, each of 2 replicas wants its own: drop --nccl-port"


@pytest.mark.parametrize("key", ["api_key", "admin_api_key"])
def test_tokenizer_workers_check_no_key(key: str) -> None:
    workers = {"model_path": "dummy", "tokenizer_worker_num": 2}
    assert refusals(ServerArgs(**workers), IMPORTANCE) == []
    (line,) = refusals(ServerArgs(**workers, **{key: "secret"}), IMPORTANCE)
    flag = "--" + key.replace("_", "-")
    assert f"{flag} with several tokenizer workers (--tokenizer-worker-num 2): use" in line
    assert "secret" not in line


def test_an_engine_has_one_tokenizer_worker() -> None:
    args = ServerArgs(model_path="dummy", tokenizer_worker_num=2)
    check_modes(args, IMPORTANCE)
    check_modes(args, ImportanceOptions(), serves_http=False)
    with pytest.raises(LaunchRefused, match="several tokenizer workers"):
        check_modes(args, IMPORTANCE, serves_http=False)


@pytest.mark.parametrize("mode", [{"tp_size": 2}, {"enable_mixed_chunk": True}, {"enable_lora": True}])
def test_modes_that_tiered_pages_have_not_run_with(mode: dict[str, Any]) -> None:
    args = ServerArgs(model_path="dummy", attention_backend="torch_native", page_size=16, **mode)
    tiered = ImportanceOptions(policy="importance", tiered=TieredOptions(residency="tiered"))
    (line,) = refusals(args, tiered)
    assert line.startswith("--kv-residency tiered does not support")
    assert line.endswith("or use --kv-residency full")


@pytest.mark.parametrize("mode", [{"tp_size": 2}, {"dp_size": 2}, {"enable_mixed_chunk": True}])
def test_modes_that_page_lists_have_not_run_with(mode: dict[str, Any]) -> None:
    args = SimpleNamespace(attention_backend="torch_native", device="cpu", **mode)
    options = ImportanceOptions(policy="observe", trace=TraceOptions(directory="x", pages=1))
    (line,) = page_list_refusals(args, options)
    assert "trace.pages of --kv-importance-config with" in line


def test_all_refusals_come_at_once(parse: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(
            *("--kv-policy", "importance", "--pp-size", "2"),
            *("--enable-two-batch-overlap", "--attention-backend", "triton"),
            *("--kv-importance-source", "torch_native"),
        )
    assert stop.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("sgl-importance: error: --kv-policy importance") for line in lines)


def test_an_eviction_policy_of_sglang_conflicts_with_ours() -> None:
    explicit_lru = ServerArgs(model_path="dummy", _radix_eviction_policy_explicitly_set=True)
    (line,) = refusals(explicit_lru, IMPORTANCE)
    assert "another eviction policy (--radix-eviction-policy): drop --radix-eviction-policy" in line
    assert refusals(explicit_lru, OBSERVE) == []


def test_our_cache_cannot_be_chosen_without_a_policy() -> None:
    args = ServerArgs(model_path="dummy", radix_cache_backend="importance")
    (line,) = refusals(args, ImportanceOptions())
    assert line.endswith("use --kv-policy importance instead")


@pytest.mark.parametrize(
    "backends",
    [
        {},
        {"attention_backend": "fa3"},
        {"prefill_attention_backend": "fa3", "decode_attention_backend": "flashinfer"},
    ],
)
@pytest.mark.parametrize("source", ["auto", "none"])
def test_no_attention_backend_is_refused_where_no_producer_is_named(
    backends: dict[str, str], source: str
) -> None:
    options = ImportanceOptions(policy="importance", source=source)
    assert refusals(ServerArgs(model_path="dummy", **backends), options) == []


@pytest.mark.parametrize("source", PRODUCERS)
def test_a_named_source_wants_its_own_backend(source: str) -> None:
    options = ImportanceOptions(policy="importance", source=source)
    assert refusals(ServerArgs(model_path="dummy", attention_backend=PRODUCERS[source]), options) == []
    (line,) = refusals(ServerArgs(model_path="dummy", attention_backend="fa3"), options)
    cure = f"use --attention-backend {PRODUCERS[source]}, or --kv-importance-source auto"
    assert f"--kv-importance-source {source} beside attention backend fa3: {cure}" in line


@pytest.mark.parametrize("source", PRODUCERS)
def test_a_named_source_wants_a_device_that_it_has_run_on(source: str) -> None:
    options = ImportanceOptions(policy="observe", source=source)
    backend = PRODUCERS[source]
    assert refusals(ServerArgs(model_path="dummy", attention_backend=backend, device="cpu"), options) == []
    (line,) = refusals(ServerArgs(model_path="dummy", attention_backend=backend, device="cuda"), options)
    assert f"--kv-importance-source {source} on device cuda: use --kv-importance-source none" in line


def test_the_rust_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    (line,) = refusals(ServerArgs(model_path="dummy"), IMPORTANCE)
    assert "unset SGLANG_RUST_SERVER" in line


def test_what_sglang_decides_itself_is_checked_too() -> None:
    args = ServerArgs(model_path="dummy")
    args._resolved_overrides = [("a model", {"speculative_algorithm": "DFLASH"})]
    assert refusals(args, IMPORTANCE) == []
    (line,) = refusals(resolving_view(args), IMPORTANCE)
    assert "speculative decoding" in line


def test_each_rule_names_a_flag_that_exists(plugin: None) -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    flags = set(parser._option_string_actions)
    assert {rule.flag for rule in RULES} <= flags


def test_an_unproven_producer_wants_a_device_and_a_backend_that_it_fits() -> None:
    chosen = ImportanceOptions(policy="observe", source="qk_probe")
    assert refusals(ServerArgs(model_path="dummy", attention_backend="triton", device="cuda"), chosen) == []
    (line,) = refusals(ServerArgs(model_path="dummy", attention_backend="flex_attention"), chosen)
    assert "qk_probe beside attention backend flex_attention: use --attention-backend fa3 or" in line
    two = ServerArgs(
        model_path="dummy", attention_backend="fa3", decode_attention_backend="flashinfer", device="cuda"
    )
    (line,) = refusals(two, chosen)
    assert "qk_probe over two attention backends (fa3, flashinfer): name one with --attention-backend" in line
    on_cpu = refusals(ServerArgs(model_path="dummy", attention_backend="torch_native", device="cpu"), chosen)
    assert any("qk_probe on a CPU: use --kv-importance-source auto" in line for line in on_cpu)


@pytest.mark.parametrize("source", sorted(set(UNPROVEN) - {"qk_probe"}))
def test_a_backend_that_emits_serves_prefill_and_decode(source: str) -> None:
    chosen = ImportanceOptions(policy="importance", source=source)
    fits = ServerArgs(model_path="dummy", attention_backend=source, device="cuda")
    assert refusals(fits, chosen) == []
    mixed = ServerArgs(
        model_path="dummy", attention_backend=source, prefill_attention_backend="fa3", device="cuda"
    )
    (line,) = refusals(mixed, chosen)
    assert f"{source} beside attention backend fa3: use --attention-backend {source}" in line
    (line,) = refusals(ServerArgs(model_path="dummy", attention_backend=source, device="cpu"), chosen)
    assert f"{source} on a CPU: use --kv-importance-source auto" in line


def test_choosing_an_unproven_producer_warns_loudly(caplog: pytest.LogCaptureFixture) -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from sglang_importance.attention import install

    stock = dict(ATTENTION_BACKENDS)
    try:
        install(ImportanceOptions(policy="importance"))
        assert "HAS HARDLY RUN ON A GPU" not in caplog.text
        assert ATTENTION_BACKENDS["triton"] is stock["triton"]
        install(ImportanceOptions(policy="importance", source="qk_probe"))
        assert "HAS HARDLY RUN ON A GPU" in caplog.text
        assert ATTENTION_BACKENDS["triton"] is not stock["triton"]
    finally:
        ATTENTION_BACKENDS.update(stock)

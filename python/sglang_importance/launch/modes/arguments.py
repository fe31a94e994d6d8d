"""What sglang's arguments switch on, and which of it is refused.

Everything here runs twice: on what the operator typed, so that a refusal comes at once, and on what sglang
made of it, because a model or a platform can switch a mode on. What only the loaded model tells is checked
where the cache is built (``loaded_model``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt.environ import envs

from sgl_importance.options.importance_options import DEFAULTS, ImportanceOptions, name_of
from sgl_importance.placement.ledger.ledger_place import address_problem
from sglang_importance.attention.score_sources import HAS_RUN_ON, NONE, PRODUCERS, UNPROVEN
from sglang_importance.launch.modes.rule import (
    FP8,
    PAIRED_KEYS,
    SPECULATION,
    Rule,
    above,
    outside,
    refused,
    unscored_modes,
)
from sglang_importance.launch.modes.tiered_pages import tiered_refusals
from sglang_importance.upstream.refusal import LaunchRefused
from sglang_importance.upstream.server_options import attention_backends

RULES: tuple[Rule, ...] = (
    # Several schedulers, beyond tensor parallelism (tree/ranks.py) and replicas with a tree each.
    Rule("pp_size", "pipeline parallelism", above(1), "use --pp-size 1"),
    Rule("dcp_size", "decode context parallelism", above(1), "use --dcp-size 1"),
    Rule("attn_cp_size", "attention context parallelism", above(1), "use --attn-cp-size 1"),
    Rule("moe_dp_size", "MoE data parallelism", above(1), "use --moe-dp-size 1"),
    Rule("dwdp_size", "distributed-weight data parallelism", above(1), "use --dwdp-size 1"),
    # Its replicas would hear of new weights at different times, and a ledger asks all ranks for theirs.
    Rule("enable_dp_attention_local_control_broadcast", "control messages to each replica alone"),
    Rule("nnodes", "several nodes", above(1), "use --nnodes 1"),
    Rule("enable_prefill_cp", "prefill context parallelism"),
    Rule("elastic_ep_backend", "elastic expert parallelism"),
    # Other processes than the launcher and one scheduler.
    Rule("disaggregation_decode_enable_offload_kvcache", "offloading of decoded KV"),
    Rule(
        "disaggregation_decode_retraction_backup",
        "host-pool retraction",
        cure="drop --disaggregation-decode-retraction-backup",
    ),
    Rule("enable_pd_role_switch", "PD role switching"),
    Rule("enable_pdmux", "PD multiplexing"),
    Rule("encoder_only", "encoder disaggregation"),
    Rule("language_only", "encoder disaggregation"),
    Rule("decoupled_spec_role", "decoupled speculation", outside("null"), "use --decoupled-spec-role null"),
    Rule("use_ray", "Ray"),
    Rule("grpc_mode", "the gRPC server"),
    Rule("smg_grpc_mode", "the gRPC server"),
    Rule("grpc_port", "the gRPC server"),
    # Batches whose rows are not one request and one query.
    Rule(
        "speculative_algorithm",
        "this speculative decoding",
        outside(None, *SPECULATION),
        f"drop --speculative-algorithm, or use one of {', '.join(SPECULATION)}",
    ),
    Rule("dllm_algorithm", "diffusion language models"),
    Rule("enable_two_batch_overlap", "two-batch overlap"),
    Rule("enable_single_batch_overlap", "single-batch overlap"),
    Rule("enable_mis", "multi-item scoring"),
    Rule("is_embedding", "embedding models"),
    Rule("enable_multimodal", "multimodal models"),
    # Python beside the attention kernel would be lost.
    Rule("enable_torch_compile", "torch.compile"),
    Rule("model_impl", "other model implementations", outside("auto", "sglang"), "use --model-impl auto"),
    # Other trees, pools and tiers than those that we tested.
    Rule("disable_radix_cache", "a server without radix cache"),
    Rule(
        "radix_cache_backend",
        "another radix cache",
        outside(None, "importance"),
        "drop --radix-cache-backend",
    ),
    Rule(
        "_radix_eviction_policy_explicitly_set",
        "another eviction policy",
        cure="drop --radix-eviction-policy",
        policies=("importance",),
    ),
    Rule(
        "radix_eviction_policy",
        "another eviction policy than lru",
        outside("lru"),
        "drop --radix-eviction-policy",
        policies=("observe",),
    ),
    Rule("radix_eviction_policy_config", "parameters of another eviction policy"),
    Rule("enable_session_radix_cache", "the session radix cache"),
    Rule("enable_streaming_session", "streaming sessions"),
    Rule("enable_lmcache", "LMCache"),
    Rule("enable_flexkv", "FlexKV"),
    Rule("enable_unified_cache_external_linker", "external linkers"),
    Rule(
        "hicache_storage_backend",
        "this storage backend",
        outside(None, "file"),
        "use --hicache-storage-backend file",
    ),
    Rule("enable_hisparse", "hierarchical sparse attention"),
    Rule("enable_unified_memory", "the unified memory pool"),
    Rule("enable_page_major_kv_layout", "the page-major KV layout"),
    Rule("prefill_only_disable_kv_cache", "a server without KV cache"),
    Rule("enable_memory_saver", "releasing memory at run time"),
    Rule(
        "kv_cache_dtype",
        "this quantized KV cache",
        outside("auto", "bf16", "bfloat16", *FP8),
        f"use --kv-cache-dtype auto or {' or '.join(FP8)}",
    ),
    Rule("device", "this device", outside(None, "cpu", "cuda"), "use --device cpu or cuda"),
)


_OF_POLICIES = ("source", "signal", "pins", "ledger", "prewarm", "misses")
"""Options and groups that a policy of ours reads; what reads the others refuses them by itself."""
_ASKING_FOR_NOTHING = ("off", "none", 0)
"""Values that are true of stock sglang, too."""


def _replica_refusals(args: Any, options: ImportanceOptions) -> Iterator[str]:
    """Data-parallel replicas that share no attention are launched apart, each with a port of its own."""
    replicas = getattr(args, "dp_size", None) or 1
    if replicas == 1:
        return
    port = getattr(args, "nccl_port", None)
    if port is not None and not getattr(args, "enable_dp_attention", False):
        # sglang itself would end in a traceback, under any policy.
        yield f"--nccl-port {port} is one port, each of {replicas} replicas wants its own: drop --nccl-port"


def _speculation_refusals(args: Any, options: ImportanceOptions) -> Iterator[str]:
    """What is kept by the digests of plain pages, beside a tree whose pages also depend on what follows."""
    algorithm = getattr(args, "speculative_algorithm", None)
    if algorithm not in PAIRED_KEYS:
        return
    kept = {
        "ledger.place": options.ledger.place not in ("auto", "off"),
        "trace.directory": bool(options.trace.directory),
    }
    for place in (place for place, is_on in kept.items() if is_on):
        what = f"{name_of(place)} with --speculative-algorithm {algorithm}"
        yield refused(options.policy, what, f"drop {name_of(place)}")


def _disaggregation_refusals(args: Any, options: ImportanceOptions) -> Iterator[str]:
    """Prefill and decode are servers of their own, each with a tree; nothing is shared."""
    mode = getattr(args, "disaggregation_mode", None) or "null"
    if mode == "null":
        return
    if mode == "decode" and not getattr(args, "disaggregation_decode_enable_radix_cache", False):
        what = "a decode server without radix cache (--disaggregation-mode decode)"
        yield refused(options.policy, what, "add --disaggregation-decode-enable-radix-cache")
    for place, is_on in {
        "ledger.place": options.ledger.place not in ("auto", "off"),
        "trace.directory": bool(options.trace.directory),
        "tiered.residency": options.is_tiered,
    }.items():
        if is_on:
            what = f"{name_of(place)} {options.at(place)} with --disaggregation-mode {mode}"
            yield refused(options.policy, what, f"drop {name_of(place)}")


def _worker_refusals(args: Any, options: ImportanceOptions) -> Iterator[str]:
    """Several tokenizer workers check no key: sglang ends them at one of its keys, and ignores the other."""
    workers = getattr(args, "tokenizer_worker_num", None) or 1
    if workers == 1:
        return
    for field in ("api_key", "admin_api_key"):
        if getattr(args, field, None):
            key = "--" + field.replace("_", "-")
            what = f"{key} with several tokenizer workers (--tokenizer-worker-num {workers})"
            yield refused(options.policy, what, f"use --tokenizer-worker-num 1, or drop {key}")


def _memory_mode_refusals(args: Any, options: ImportanceOptions) -> Iterator[str]:
    mode = getattr(args, "hicache_host_memory_mode", "cache")
    if mode != "cache" and not options.is_tiered:
        what = f"host memory as a staging buffer (--hicache-host-memory-mode {mode})"
        yield refused(options.policy, what, "use --hicache-host-memory-mode cache")


def attention_source_refusals(args: Any, options: ImportanceOptions) -> Iterator[str]:
    """A producer wants the attention backend that it was made for; ``auto`` and ``none`` fit any."""
    in_use = attention_backends(args)
    if options.source not in ("auto", NONE):
        for mode in unscored_modes(args):
            what = f"{name_of('source')} {options.source} with {mode}"
            yield refused(options.policy, what, f"use {name_of('source')} {NONE}")
    if options.source in UNPROVEN:
        yield from _unproven_refusals(args, options, in_use)
    elif options.source in PRODUCERS:
        emitting = PRODUCERS[options.source]
        device = getattr(args, "device", None)
        if device not in (None, *HAS_RUN_ON[options.source]):
            what = f"{name_of('source')} {options.source} on device {device}"
            yield refused(options.policy, what, f"use {name_of('source')} {NONE}")
        for backend in sorted(in_use - {emitting}):
            what = f"{name_of('source')} {options.source} beside attention backend {backend}"
            yield refused(
                options.policy, what, f"use --attention-backend {emitting}, or {name_of('source')} auto"
            )


def _unproven_refusals(args: Any, options: ImportanceOptions, in_use: set[str]) -> Iterator[str]:
    backends = UNPROVEN[options.source]
    if getattr(args, "enable_mixed_chunk", False):
        what = f"{name_of('source')} {options.source} with mixed chunks (--enable-mixed-chunk)"
        yield refused(options.policy, what, f"drop --enable-mixed-chunk, or use {name_of('source')} none")
    if getattr(args, "device", None) == "cpu":
        what = f"{name_of('source')} {options.source} on a CPU"
        yield refused(options.policy, what, f"use {name_of('source')} auto")
    for backend in sorted(in_use - set(backends)):
        what = f"{name_of('source')} {options.source} beside attention backend {backend}"
        yield refused(options.policy, what, f"use --attention-backend {' or '.join(backends)}")
    if len(in_use) > 1 and in_use <= set(backends):
        # Each would get a producer, and rows, of its own.
        what = (
            f"{name_of('source')} {options.source} over two attention backends ({', '.join(sorted(in_use))})"
        )
        yield refused(options.policy, what, "name one with --attention-backend for prefill and decode alike")


def refusals(args: Any, options: ImportanceOptions) -> list[str]:
    """One line for each reason why ``args`` cannot run under ``options.policy``; empty where they can.

    Args:
        args: sglang's arguments as typed or as resolved; a field that is absent counts as off.
        options: what the operator chose.
    """
    if options.is_stock:
        return _stock_refusals(args, options)
    lines = []
    for rule in RULES:
        if options.policy not in rule.policies or not hasattr(args, rule.field):
            continue
        value = getattr(args, rule.field)
        if rule.field == "hicache_storage_backend" and options.store.directory:
            continue  # it is ours, or checked by it
        if rule.refuses(value):
            lines.append(rule.refusal(value, options.policy))
    lines.extend(attention_source_refusals(args, options))
    lines.extend(_replica_refusals(args, options))
    lines.extend(_speculation_refusals(args, options))
    lines.extend(_disaggregation_refusals(args, options))
    lines.extend(_worker_refusals(args, options))
    lines.extend(_memory_mode_refusals(args, options))
    if options.ledger_place and (problem := address_problem(options.ledger_place)):
        lines.append(f"{name_of('ledger.place')}: {problem}")
    if options.is_tiered:
        lines.extend(tiered_refusals(args, options))
    if envs.SGLANG_RUST_SERVER.get():
        lines.append(
            refused(options.policy, "the Rust server (SGLANG_RUST_SERVER)", "unset SGLANG_RUST_SERVER")
        )
    return list(dict.fromkeys(lines))


def _stock_refusals(args: Any, options: ImportanceOptions) -> list[str]:
    lines = []
    if getattr(args, "radix_cache_backend", None) == "importance":
        lines.append(
            "--radix-cache-backend importance is chosen by --kv-policy: use --kv-policy importance instead"
        )
    if options.trace.directory:
        lines.append(
            f"{name_of('trace.directory')} has nothing to record under --kv-policy default: use observe"
        )
    if options.ledger.place not in ("auto", "off"):
        lines.append(f"{name_of('ledger.place')} has nothing to keep under --kv-policy default: use observe")
    for place, default in DEFAULTS.items():
        is_of_policies = place.partition(".")[0] in _OF_POLICIES and place != "ledger.place"
        value = options.at(place)
        if is_of_policies and value not in (default, *_ASKING_FOR_NOTHING):
            lines.append(
                f"{name_of(place)} has no effect under --kv-policy default: drop it, or use importance"
            )
    return lines


def check_modes(args: Any, options: ImportanceOptions, *, serves_http: bool = True) -> None:
    """Refuses a launch that ``refusals`` has lines on.

    Args:
        args: as ``refusals``.
        options: as ``refusals``.
        serves_http: whether a server will listen, rather than an engine inside a program.

    Raises:
        LaunchRefused: with one line for every mode that is on and not tested.
    """
    lines = refusals(args, options)
    if not serves_http and not options.is_stock and (getattr(args, "tokenizer_worker_num", None) or 1) > 1:
        mode = "an engine with several tokenizer workers (tokenizer_worker_num)"
        lines.append(refused(options.policy, mode, "use tokenizer_worker_num=1"))
    if lines:
        raise LaunchRefused(lines)

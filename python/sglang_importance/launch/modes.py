"""The modes of sglang that are refused under ``--kv-policy observe`` and ``importance``, as not tested.

Everything here runs twice: on what the operator typed, so that a refusal comes at once, and on what sglang
made of it, because a model or a platform can switch a mode on. What only the loaded model tells is checked
where the cache is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.environ import envs

from sgl_importance.ledger.ledger_place import address_problem
from sgl_importance.options import ImportanceOptions
from sgl_importance.settings import KvPolicy, flag
from sglang_importance.attention.score_sources import LISTED_BACKEND, NONE, PRODUCERS, UNPROVEN
from sglang_importance.launch.unscored_modes import FP8, PAIRED_KEYS, SPECULATION, unscored_modes
from sglang_importance.upstream.refusal import LaunchRefused
from sglang_importance.upstream.server_options import attention_backends

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

ENFORCED: tuple[KvPolicy, ...] = ("observe", "importance")

Test = Callable[[Any], bool]


def above(limit: int) -> Test:
    return lambda value: value is not None and value > limit


def outside(*allowed: object) -> Test:
    return lambda value: value not in allowed


@dataclass(frozen=True, slots=True)
class Rule:
    """One mode that has not been tested with ours.

    Attributes:
        field: of sglang's ServerArgs.
        mode: the mode's name in a sentence.
        refuses: whether a value of the field switches the mode on.
        cure: what to do; dropping the flag where None.
        policies: the values of ``--kv-policy`` that the rule is for.
    """

    field: str
    mode: str
    refuses: Test = bool
    cure: str | None = None
    policies: tuple[KvPolicy, ...] = ENFORCED

    @property
    def flag(self) -> str:
        return "--" + self.field.strip("_").removesuffix("_explicitly_set").replace("_", "-")

    def refusal(self, value: object, policy: KvPolicy) -> str:
        shown = self.flag if value is True else f"{self.flag} {value}"
        return _line(policy, f"{self.mode} ({shown})", self.cure or f"drop {self.flag}")


def _line(policy: KvPolicy, mode: str, cure: str) -> str:
    return f"{flag('policy')} {policy} does not support {mode}: {cure}, or use {flag('policy')} default"


RULES: tuple[Rule, ...] = (
    # Several schedulers, beyond tensor parallelism (tree/ranks.py) and replicas with a tree each.
    Rule("pp_size", "pipeline parallelism", above(1), "use --pp-size 1"),
    Rule("dcp_size", "decode context parallelism", above(1), "use --dcp-size 1"),
    Rule("attn_cp_size", "attention context parallelism", above(1), "use --attn-cp-size 1"),
    Rule("moe_dp_size", "MoE data parallelism", above(1), "use --moe-dp-size 1"),
    Rule("dwdp_size", "distributed-weight data parallelism", above(1), "use --dwdp-size 1"),
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


def _attention_refusals(args: Any, options: ImportanceOptions) -> Iterator[str]:
    """A producer wants the attention backend that it was made for; ``auto`` and ``none`` fit any."""
    in_use = attention_backends(args)
    if options.source not in ("auto", NONE):
        for mode in unscored_modes(args):
            what = f"{flag('source')} {options.source} with {mode}"
            yield _line(options.policy, what, f"use {flag('source')} {NONE}")
    if options.source in UNPROVEN:
        yield from _unproven_refusals(args, options, in_use)
    elif options.source in PRODUCERS:
        emitting = PRODUCERS[options.source]
        for backend in sorted(in_use - {emitting}):
            what = f"{flag('source')} {options.source} beside attention backend {backend}"
            yield _line(options.policy, what, f"use --attention-backend {emitting}, or {flag('source')} auto")


def _unproven_refusals(args: Any, options: ImportanceOptions, in_use: set[str]) -> Iterator[str]:
    backends = UNPROVEN[options.source]
    if getattr(args, "enable_mixed_chunk", False):
        what = f"{flag('source')} {options.source} with mixed chunks (--enable-mixed-chunk)"
        yield _line(options.policy, what, f"drop --enable-mixed-chunk, or use {flag('source')} none")
    if getattr(args, "device", None) == "cpu":
        what = f"{flag('source')} {options.source} on a CPU"
        yield _line(options.policy, what, f"use {flag('source')} auto")
    for backend in sorted(in_use - set(backends)):
        what = f"{flag('source')} {options.source} beside attention backend {backend}"
        yield _line(options.policy, what, f"use --attention-backend {' or '.join(backends)}")
    if len(in_use) > 1 and in_use <= set(backends):
        # Each would get a producer, and rows, of its own.
        what = f"{flag('source')} {options.source} over two attention backends ({', '.join(sorted(in_use))})"
        yield _line(options.policy, what, "name one with --attention-backend for prefill and decode alike")


_TIERED_RULES: tuple[Rule, ...] = (
    Rule("tp_size", "tensor parallelism", above(1), "use --tp-size 1"),
    Rule("dp_size", "data parallelism", above(1), "use --dp-size 1"),
    Rule("enable_mixed_chunk", "mixed chunks"),
    Rule("enable_lora", "LoRA"),
    Rule("lora_paths", "LoRA"),
    Rule("page_size", "pages of one token", lambda size: size == 1, "use --page-size 16"),
    Rule("attention_backend", "this attention backend", outside(None, "torch_native", "triton")),
    Rule("prefill_attention_backend", "this attention backend", outside(None, "torch_native", "triton")),
    Rule("decode_attention_backend", "this attention backend", outside(None, "torch_native", "triton")),
)


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
    kept = {"ledger": options.ledger not in ("auto", "off"), "trace": bool(options.trace)}
    for option in (option for option, is_on in kept.items() if is_on):
        what = f"{flag(option)} with --speculative-algorithm {algorithm}"
        yield _line(options.policy, what, f"drop {flag(option)}")


def _disaggregation_refusals(args: Any, options: ImportanceOptions) -> Iterator[str]:
    """Prefill and decode are servers of their own, each with a tree; nothing is shared."""
    mode = getattr(args, "disaggregation_mode", None) or "null"
    if mode == "null":
        return
    if mode == "decode" and not getattr(args, "disaggregation_decode_enable_radix_cache", False):
        what = "a decode server without radix cache (--disaggregation-mode decode)"
        yield _line(options.policy, what, "add --disaggregation-decode-enable-radix-cache")
    for option, is_on in {
        "ledger": options.ledger not in ("auto", "off"),
        "trace": bool(options.trace),
        "residency": options.is_tiered,
    }.items():
        if is_on:
            what = f"{flag(option)} {getattr(options, option)} with --disaggregation-mode {mode}"
            yield _line(options.policy, what, f"drop {flag(option)}")


def _worker_refusals(args: Any, options: ImportanceOptions) -> Iterator[str]:
    """Several tokenizer workers check no key: sglang ends them at one of its keys, and ignores the other."""
    workers = getattr(args, "tokenizer_worker_num", None) or 1
    if workers == 1:
        return
    for field in ("api_key", "admin_api_key"):
        if getattr(args, field, None):
            key = "--" + field.replace("_", "-")
            what = f"{key} with several tokenizer workers (--tokenizer-worker-num {workers})"
            yield _line(options.policy, what, f"use --tokenizer-worker-num 1, or drop {key}")


def _memory_mode_refusals(args: Any, options: ImportanceOptions) -> Iterator[str]:
    mode = getattr(args, "hicache_host_memory_mode", "cache")
    if mode != "cache" and not options.is_tiered:
        what = f"host memory as a staging buffer (--hicache-host-memory-mode {mode})"
        yield _line(options.policy, what, "use --hicache-host-memory-mode cache")


def _tiered_refusals(args: Any, options: ImportanceOptions) -> Iterator[str]:
    """Tiered pages have a host tier of their own, and attention of their own to read it."""
    mode = f"{flag('residency')} tiered"
    for untried in unscored_modes(args):
        yield f"{mode} does not support {untried}: drop that flag, or use {flag('residency')} full"
    values = {rule: getattr(args, rule.field, None) for rule in _TIERED_RULES}
    for rule in filter(lambda rule: rule.refuses(values[rule]), _TIERED_RULES):
        cure = rule.cure or f"drop {rule.flag}"
        yield (
            f"{mode} does not support {rule.mode} ({rule.flag} {values[rule]}): {cure}, "
            f"or use {flag('residency')} full"
        )
    backends = attention_backends(args)
    if len(backends) > 1:
        names = " and ".join(sorted(backends))
        yield f"{mode} needs one attention backend for prefill and decode, not {names}"
    if "triton" in backends and options.source not in ("auto", NONE):
        yield (
            f"{mode} has no page scores beside attention backend triton: "
            f"drop {flag('source')} {options.source}"
        )
    if getattr(args, "device", None) not in (None, "cpu"):
        yield from _tiered_refusals_on_a_gpu(args, options, mode)
    if getattr(args, "enable_hierarchical_cache", False) and not options.store:
        yield (
            f"{mode} holds all KV on the host, where HiCache would hold it once more: drop "
            f"--enable-hierarchical-cache, or name a directory for storage below with {flag('store')}"
        )


def _tiered_refusals_on_a_gpu(args: Any, options: ImportanceOptions, mode: str) -> Iterator[str]:
    for backend in attention_backends(args) - {"triton"}:
        yield f"{mode} on a GPU does not support attention backend {backend}: use --attention-backend triton"
    if not getattr(args, "disable_cuda_graph", True):
        yield f"{mode} does not support CUDA graphs: add --disable-cuda-graph"
    if getattr(args, "max_total_tokens", None) is None:
        yield f"{mode} keeps KV in host memory: say for how many tokens, with --max-total-tokens"
    if options.store:
        yield f"{mode} does not support storage on a GPU: drop {flag('store')}"


def page_list_refusals(args: Any, options: ImportanceOptions) -> Iterator[str]:
    """Page lists are taken beside the attention backend, and on the kind of device, that they have run on.

    Args:
        args: as resolved only: upstream puts ``torch_native`` in the place of a backend that a CPU lacks.
        options: what the operator chose.
    """
    if not options.trace_pages:
        return
    for rule in (rule for rule in _TIERED_RULES[:3] if rule.refuses(getattr(args, rule.field, None))):
        what = f"{flag('trace_pages')} with {rule.mode} ({rule.flag} {getattr(args, rule.field)})"
        yield _line(options.policy, what, rule.cure or f"drop {rule.flag}")
    for untried in unscored_modes(args):
        yield _line(options.policy, f"{flag('trace_pages')} with {untried}", f"drop {flag('trace_pages')}")
    for backend in sorted(attention_backends(args) - {LISTED_BACKEND}):
        what = f"{flag('trace_pages')} beside attention backend {backend}"
        yield _line(options.policy, what, f"use --attention-backend {LISTED_BACKEND}")
    if getattr(args, "device", None) not in (None, "cpu"):
        what = f"{flag('trace_pages')} on a GPU, where nobody has run it"
        yield _line(options.policy, what, "use --device cpu")


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
        if rule.field == "hicache_storage_backend" and options.store:
            continue  # it is ours, or checked by it
        if rule.refuses(value):
            lines.append(rule.refusal(value, options.policy))
    lines.extend(_attention_refusals(args, options))
    lines.extend(_replica_refusals(args, options))
    lines.extend(_speculation_refusals(args, options))
    lines.extend(_disaggregation_refusals(args, options))
    lines.extend(_worker_refusals(args, options))
    lines.extend(_memory_mode_refusals(args, options))
    if options.ledger_place and (problem := address_problem(options.ledger_place)):
        lines.append(f"{flag('ledger')}: {problem}")
    if options.is_tiered:
        lines.extend(_tiered_refusals(args, options))
    if envs.SGLANG_RUST_SERVER.get():
        lines.append(
            _line(options.policy, "the Rust server (SGLANG_RUST_SERVER)", "unset SGLANG_RUST_SERVER")
        )
    return list(dict.fromkeys(lines))


def _stock_refusals(args: Any, options: ImportanceOptions) -> list[str]:
    lines = []
    if getattr(args, "radix_cache_backend", None) == "importance":
        lines.append(
            "--radix-cache-backend importance is chosen by --kv-policy: use --kv-policy importance instead"
        )
    if options.trace:
        lines.append(f"{flag('trace')} has nothing to record under --kv-policy default: use observe")
    if options.ledger not in ("auto", "off"):
        lines.append(f"{flag('ledger')} has nothing to keep under --kv-policy default: use observe")
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
        lines.append(_line(options.policy, mode, "use tokenizer_worker_num=1"))
    if lines:
        raise LaunchRefused(lines)


def model_refusals(ctx: TreeCacheBuildContext, options: ImportanceOptions) -> list[str]:
    """One line for each reason why the loaded model cannot run under ``options.policy``."""
    config = ctx.model_config
    attention = config.attention_arch.name
    found = {
        "models whose layers all have a sliding window": ctx.is_hybrid_swa and not ctx.full_tokens_per_layer,
        "state-space and hybrid linear-attention models": ctx.is_hybrid_ssm,
        "sparse-attention models": ctx.is_dsa,
        f"{attention} attention": attention not in ("MHA", "MLA"),
        "encoder-decoder models": config.is_encoder_decoder,
        "multimodal models": config.is_multimodal,
        "embedding and reward models": not config.is_generation,
    }
    cure = "serve a text model with multi-head, grouped-query or latent attention"
    lines = [_line(options.policy, mode, cure) for mode, on in found.items() if on]
    return lines or list(_part_refusals(ctx, options))


def _part_refusals(ctx: TreeCacheBuildContext, options: ImportanceOptions) -> Iterator[str]:
    """Parts of ours that have run with one pool of keys and values, in layers that see the whole sequence."""
    if options.source in UNPROVEN and ctx.tp_worker.model_runner.kv_cache_dtype.itemsize == 1:
        # A checkpoint may say so, where the flag does not.
        what = f"{flag('source')} {options.source} with a checkpoint's quantized KV cache"
        yield _line(options.policy, what, f"use {flag('source')} {NONE}")
    if ctx.model_config.attention_arch.name == "MLA":
        model = "multi-head latent attention"
    elif ctx.is_hybrid_swa or _has_window(ctx.tp_worker.model_runner.model):
        model = "sliding-window layers"
    else:
        return
    if options.is_tiered:
        yield f"{flag('residency')} tiered does not support {model}: use {flag('residency')} full"
    if options.source in UNPROVEN:
        what = f"{flag('source')} {options.source} with {model}"
        yield _line(options.policy, what, f"use {flag('source')} none")


def _has_window(model: torch.nn.Module) -> bool:
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = (module for module in model.modules() if isinstance(module, RadixAttention))
    return any((layer.sliding_window_size or -1) > -1 for layer in layers)

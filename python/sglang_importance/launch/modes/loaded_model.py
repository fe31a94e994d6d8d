"""What a model's config tells, and what only the loaded model does: kinds of attention that are refused, as
not tested."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sgl_importance.options.importance_options import ImportanceOptions, name_of
from sglang_importance.attention.score_sources import NONE, UNPROVEN
from sglang_importance.launch.modes.rule import refused

if TYPE_CHECKING:
    import torch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext


def config_refusals(config: ModelConfig, options: ImportanceOptions) -> list[str]:
    """One line for each reason why a model cannot run under ``options.policy``, before it is loaded.

    ``model_refusals`` says the same of the loaded one, and what the config does not tell.
    """
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, mambaish_config
    from sglang.srt.configs.model_config import is_deepseek_dsa

    is_linear = hybrid_gdn_config(config) is not None
    has_states = mambaish_config(config) is not None and not is_linear
    lines = _refused_kinds(config, options, has_states=has_states, is_dsa=is_deepseek_dsa(config.hf_config))
    kind = _kind(config, is_linear=is_linear, has_windows=config.is_hybrid_swa)
    return lines or list(_one_pool_refusals(kind, options))


def _refused_kinds(
    config: ModelConfig,
    options: ImportanceOptions,
    *,
    has_states: bool,
    is_dsa: bool,
    all_windows: bool = False,
) -> list[str]:
    attention = config.attention_arch.name
    found = {
        "models whose layers all have a sliding window": all_windows,
        "state-space models, and linear attention but gated delta nets": has_states,
        "sparse-attention models": is_dsa,
        f"{attention} attention": attention not in ("MHA", "MLA"),
        "encoder-decoder models": config.is_encoder_decoder,
        "multimodal models": config.is_multimodal,
        "embedding and reward models": not config.is_generation,
    }
    cure = "serve a text model with multi-head, grouped-query or latent attention"
    return [refused(options.policy, mode, cure) for mode, on in found.items() if on]


def model_refusals(ctx: TreeCacheBuildContext, options: ImportanceOptions) -> list[str]:
    """One line for each reason why the loaded model cannot run under ``options.policy``."""
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config

    lines = _refused_kinds(
        ctx.model_config,
        options,
        has_states=ctx.is_hybrid_ssm and hybrid_gdn_config(ctx.model_config) is None,
        is_dsa=ctx.is_dsa,
        all_windows=ctx.is_hybrid_swa and not ctx.full_tokens_per_layer,
    )
    return lines or list(_part_refusals(ctx, options))


def _part_refusals(ctx: TreeCacheBuildContext, options: ImportanceOptions) -> Iterator[str]:
    """Parts of ours that have run with one pool of keys and values, in layers that see the whole sequence."""
    if options.source in UNPROVEN and ctx.tp_worker.model_runner.kv_cache_dtype.itemsize == 1:
        # A checkpoint may say so, where the flag does not.
        what = f"{name_of('source')} {options.source} with a checkpoint's quantized KV cache"
        yield refused(options.policy, what, f"use {name_of('source')} {NONE}")
    arguments: Any = ctx.server_args  # sglang puts its fields together at import
    residency = name_of("tiered.residency")
    loaded = ctx.tp_worker.model_runner.model
    kind = _kind(
        ctx.model_config, is_linear=ctx.is_hybrid_ssm, has_windows=ctx.is_hybrid_swa or _has_window(loaded)
    )
    if kind is None:
        if options.is_tiered and _changes_logits(loaded):
            what = "logits with a soft cap or a temperature by length"
            yield f"{residency} tiered does not support {what}: use {residency} full"
        return
    if ctx.is_hybrid_ssm and arguments.disaggregation_mode != "null":
        what = f"--disaggregation-mode {arguments.disaggregation_mode} with {kind}"
        yield refused(options.policy, what, "drop --disaggregation-mode")
    yield from _one_pool_refusals(kind, options)
    algorithm = arguments.speculative_algorithm
    if algorithm is not None and arguments.device == "cpu":
        # Drafts are verified in torch there (cpu/verified_drafts.py), over plain keys of the whole sequence,
        # and no state of linear attention is taken back where they are wrong.
        what = f"--speculative-algorithm {algorithm} with {kind} on a CPU"
        yield refused(options.policy, what, "drop --speculative-algorithm")


def _kind(config: ModelConfig, *, is_linear: bool, has_windows: bool) -> str | None:
    """What a model has beside one pool of keys and values, in layers that see the whole sequence."""
    if is_linear:
        return "linear attention"
    if config.attention_arch.name == "MLA":
        return "multi-head latent attention"
    return "sliding-window layers" if has_windows else None


def _one_pool_refusals(kind: str | None, options: ImportanceOptions) -> Iterator[str]:
    """Parts of ours that want that pool alone, beside a model of ``kind``."""
    if kind is None:
        return
    if options.is_tiered:
        residency = name_of("tiered.residency")
        yield f"{residency} tiered does not support {kind}: use {residency} full"
    if options.source in UNPROVEN:
        what = f"{name_of('source')} {options.source} with {kind}"
        yield refused(options.policy, what, f"use {name_of('source')} none")


def _has_window(model: torch.nn.Module) -> bool:
    from sglang_importance.attention.layers import attention_layers

    return any((layer.sliding_window_size or -1) > -1 for layer in attention_layers(model))


def _changes_logits(model: torch.nn.Module) -> bool:
    """Whether a logit is more than a scaled product: Grok's are, which has no window."""
    from sglang_importance.attention.layers import attention_layers, has_temperature

    return any((layer.logit_cap or 0.0) > 0 or has_temperature(layer) for layer in attention_layers(model))

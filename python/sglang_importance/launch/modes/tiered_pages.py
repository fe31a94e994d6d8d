"""The modes that are refused beside tiered pages, and beside recorded page lists."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from sgl_importance.options.importance_options import ImportanceOptions, name_of
from sglang_importance.attention.score_sources import LISTED_BACKEND, NONE
from sglang_importance.launch.modes.rule import Rule, above, outside, refused, unscored_modes
from sglang_importance.upstream.server_options import attention_backends

logger = logging.getLogger(__name__)

_PAGE_LIST_RULES: tuple[Rule, ...] = (
    Rule("tp_size", "tensor parallelism", above(1), "use --tp-size 1"),
    Rule("dp_size", "data parallelism", above(1), "use --dp-size 1"),
    Rule("enable_mixed_chunk", "mixed chunks"),
)
_TIERED_RULES: tuple[Rule, ...] = (
    *_PAGE_LIST_RULES,
    Rule("enable_lora", "LoRA"),
    Rule("lora_paths", "LoRA"),
    Rule("page_size", "pages of one token", lambda size: size == 1, "use --page-size 16"),
    # Selectors are calibrated by the model's weights, before these come.
    Rule(
        "startup_weight_load_mode",
        "weights that come last",
        lambda mode: mode == "overlap",
        "use --startup-weight-load-mode serial",
    ),
    Rule("attention_backend", "this attention backend", outside(None, "torch_native", "triton")),
    Rule("prefill_attention_backend", "this attention backend", outside(None, "torch_native", "triton")),
    Rule("decode_attention_backend", "this attention backend", outside(None, "torch_native", "triton")),
)


def warn_of_dummy_weights(args: Any, options: ImportanceOptions) -> None:
    """``bits`` is calibrated once, at the start, whatever weights a request brings later.

    Args:
        args: sglang's arguments as typed.
        options: what the operator chose.
    """
    if options.sparse.selector == "bits" and getattr(args, "load_format", None) == "dummy":
        logger.warning(
            "KV importance: %s bits is calibrated by the random weights of --load-format dummy: weights that "
            "come later are served with worse choices. Start with the weights that you serve",
            name_of("sparse.selector"),
        )


def tiered_refusals(args: Any, options: ImportanceOptions) -> Iterator[str]:
    """Tiered pages have a host tier of their own, and attention of their own to read it."""
    mode = f"{name_of('tiered.residency')} tiered"
    for untried in unscored_modes(args):
        yield f"{mode} does not support {untried}: drop that flag, or use {name_of('tiered.residency')} full"
    values = {rule: getattr(args, rule.field, None) for rule in _TIERED_RULES}
    for rule in filter(lambda rule: rule.refuses(values[rule]), _TIERED_RULES):
        cure = rule.cure or f"drop {rule.flag}"
        yield (
            f"{mode} does not support {rule.mode} ({rule.flag} {values[rule]}): {cure}, "
            f"or use {name_of('tiered.residency')} full"
        )
    backends = attention_backends(args)
    if len(backends) > 1:
        names = " and ".join(sorted(backends))
        yield f"{mode} needs one attention backend for prefill and decode, not {names}"
    if "triton" in backends and options.source not in ("auto", NONE):
        yield (
            f"{mode} has no page scores beside attention backend triton: "
            f"drop {name_of('source')} {options.source}"
        )
    if getattr(args, "device", None) not in (None, "cpu"):
        yield from _tiered_refusals_on_a_gpu(args, options, mode)
    if getattr(args, "enable_hierarchical_cache", False) and not options.store.directory:
        yield (
            f"{mode} holds all KV on the host, where HiCache would hold it once more: drop "
            "--enable-hierarchical-cache, or name a directory for storage below with "
            f"{name_of('store.directory')}"
        )


def _tiered_refusals_on_a_gpu(args: Any, options: ImportanceOptions, mode: str) -> Iterator[str]:
    for backend in attention_backends(args) - {"triton"}:
        yield f"{mode} on a GPU does not support attention backend {backend}: use --attention-backend triton"
    if not getattr(args, "disable_cuda_graph", True):
        if not options.is_sparse:
            yield f"{mode} has CUDA graphs only where a selector chooses pages: add --disable-cuda-graph"
        elif getattr(args, "cuda_graph_backend_prefill", None) != "disabled":
            yield f"{mode} has no CUDA graphs of prefills: add --cuda-graph-backend-prefill disabled"
    if getattr(args, "max_total_tokens", None) is None:
        yield f"{mode} keeps KV in host memory: say for how many tokens, with --max-total-tokens"
    if options.store.directory:
        yield f"{mode} does not support storage on a GPU: drop {name_of('store.directory')}"


def page_list_refusals(args: Any, options: ImportanceOptions) -> Iterator[str]:
    """Page lists are taken beside the attention backend, and on the kind of device, that they have run on.

    Args:
        args: as resolved only: upstream puts ``torch_native`` in the place of a backend that a CPU lacks.
        options: what the operator chose.
    """
    if not options.trace.pages:
        return
    for rule in (rule for rule in _PAGE_LIST_RULES if rule.refuses(getattr(args, rule.field, None))):
        what = f"{name_of('trace.pages')} with {rule.mode} ({rule.flag} {getattr(args, rule.field)})"
        yield refused(options.policy, what, rule.cure or f"drop {rule.flag}")
    for untried in unscored_modes(args):
        yield refused(
            options.policy, f"{name_of('trace.pages')} with {untried}", f"drop {name_of('trace.pages')}"
        )
    for backend in sorted(attention_backends(args) - {LISTED_BACKEND}):
        what = f"{name_of('trace.pages')} beside attention backend {backend}"
        yield refused(options.policy, what, f"use --attention-backend {LISTED_BACKEND}")
    if getattr(args, "device", None) not in (None, "cpu"):
        what = f"{name_of('trace.pages')} on a GPU, where nobody has run it"
        yield refused(options.policy, what, "use --device cpu")

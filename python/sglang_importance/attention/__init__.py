"""Attention backends that emit page scores."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING

from sgl_importance.options.importance_options import ImportanceOptions
from sglang_importance.attention.score_sources import NONE, UNPROVEN
from sglang_importance.upstream.hooks import install_hooks

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner

    CreateBackend = Callable[[ModelRunner], AttentionBackend]

logger = logging.getLogger(__name__)


def install(options: ImportanceOptions) -> None:
    """Makes this process build the emitting variant of every attention backend that has one.

    For the scheduler process, before its model runner exists, under ``observe`` and ``importance`` only. With
    the source ``none`` every backend stays upstream's.
    """
    if options.source == NONE:
        logger.info(
            "KV importance: No page scores (--kv-importance-source none): attention runs as in stock sglang"
        )
        return
    _replace("torch_native", options)
    if options.source in UNPROVEN:
        logger.warning(
            "KV importance: --kv-importance-source %s HAS HARDLY RUN ON A GPU: its tests passed on one H200, "
            "where it slowed a model's steps by 0.5 to 10 %%. Do not serve users with it.",
            options.source,
        )
        if options.source == "qk_probe":
            _attach_probe(options)
        else:
            _replace(options.source, options)
        # Imports Triton, which decides then how kernels run: not where none of them are needed.
        from sglang_importance.attention.reserved_memory import HOOKS

        install_hooks(HOOKS)


def _attach_probe(options: ImportanceOptions) -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    for name in UNPROVEN[options.source]:
        if name in ATTENTION_BACKENDS:
            ATTENTION_BACKENDS[name] = _probed(ATTENTION_BACKENDS[name], options)


def _probed(create: CreateBackend, options: ImportanceOptions) -> CreateBackend:
    @wraps(create)
    def create_probed(model_runner: ModelRunner) -> AttentionBackend:
        # Triton decides while it is imported how kernels run: not before it is needed.
        from sglang_importance.attention.prefill_probe import QkProbe
        from sglang_importance.attention.probe_emission import ProbeEmission

        backend = create(model_runner)
        if not model_runner.is_draft_worker:
            probe = QkProbe(backend, model_runner, options)
            ProbeEmission(probe, backend, model_runner, options)
            backend.rows = probe.rows  # type: ignore[attr-defined]  # the cache looks for them there
        return backend

    return create_probed


def _replace(name: str, options: ImportanceOptions) -> None:
    """Puts ours in the place of an attention backend, but for drafts."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    create: CreateBackend = ATTENTION_BACKENDS[name]

    @wraps(create)
    def create_emitting(model_runner: ModelRunner) -> AttentionBackend:
        if model_runner.is_draft_worker:
            return create(model_runner)
        return _emitting(name)(model_runner, options)

    register_attention_backend(name)(create_emitting)


def _emitting(name: str) -> Callable[[ModelRunner, ImportanceOptions], AttentionBackend]:
    """The backend of that name that emits, imported when one is built: two of them bring Triton."""
    if name == "triton":
        from sglang_importance.attention.triton import EmittingTritonBackend

        return EmittingTritonBackend
    if name == "flashinfer":
        from sglang_importance.attention.flashinfer import EmittingFlashInferBackend

        return EmittingFlashInferBackend
    from sglang_importance.attention.torch_native import EmittingTorchNativeBackend

    return EmittingTorchNativeBackend

"""Page scores beside sglang's attention backends: which producer fits which."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sgl_importance.options.importance_options import ImportanceOptions, name_of
from sglang_importance.attention.score_sources import NONE, PRODUCERS, UNPROVEN
from sglang_importance.launch.modes.rule import refused
from sglang_importance.launch.modes.unscored import unscored_modes
from sglang_importance.upstream.server_options import attention_backends


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

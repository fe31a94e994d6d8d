"""Our options on sglang's ``ServerArgs``: they travel to every scheduler, through pickling too."""

from __future__ import annotations

from typing import Any

from sgl_importance.options.importance_options import ImportanceOptions

RADIX_CACHE_BACKEND = "importance"
OPTIONS_ATTRIBUTE = "_sgl_importance"


def importance_options(server_args: Any) -> ImportanceOptions | None:
    """The options of a server under ``observe`` or ``importance``; None where sglang must behave as stock."""
    options: ImportanceOptions | None = getattr(server_args, OPTIONS_ATTRIBUTE, None)
    return None if options is None or options.is_stock else options


def store_options(server_args: Any) -> ImportanceOptions | None:
    """The options of a server with a store, under any policy; None without one."""
    options: ImportanceOptions | None = getattr(server_args, OPTIONS_ATTRIBUTE, None)
    return options if options is not None and options.store.directory else None


def attach_options(server_args: Any, options: ImportanceOptions) -> None:
    """Makes the options travel with ``server_args``."""
    setattr(server_args, OPTIONS_ATTRIBUTE, options)


def attention_backends(args: Any) -> set[str]:
    """Names of the attention backends chosen for prefill and decode; empty where none is named."""
    base = getattr(args, "attention_backend", None)
    phases = ("prefill_attention_backend", "decode_attention_backend")
    chosen = (getattr(args, phase, None) or base for phase in phases)
    return {backend for backend in chosen if backend is not None}


def data_parallel_rank() -> int:
    """Of the replica that this scheduler belongs to."""
    from sglang.srt.runtime_context import get_parallel  # there once a server starts

    parallel = get_parallel()
    if parallel.enable_dp_attention:
        return int(parallel.attn_dp_rank)
    return int(parallel.dp_rank or 0)

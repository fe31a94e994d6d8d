"""Mounts the verified store where ``--kv-importance-store`` asks for it, under any policy."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec.toml
import msgspec.yaml

from sgl_importance.json_text import BadJson, decode_json
from sgl_importance.options.importance_options import DEFAULTS, ImportanceOptions, name_of
from sgl_importance.storage.checksum import checksum_problem
from sgl_importance.storage.store import check_writable
from sgl_importance.storage.tier_chain.open_chain import chain_problems
from sgl_importance.storage.tier_chain.tier_file import TierFileError, read_tier_file
from sglang_importance.storage.interfaces import DYNAMIC, INTERFACES, TESTED, UNUSABLE
from sglang_importance.upstream.hooks import install_hooks, is_applied
from sglang_importance.upstream.refusal import LaunchRefused

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.scheduler import Scheduler


BACKEND_MODULE = "sglang_importance.storage.backend"
BACKEND_CLASS = "VerifiedStorage"
# Settings of a dynamic backend of the operator's own: ours take their place.
_DYNAMIC_SETTINGS = ("backend_name", "module_path", "class_name", "interface_v1")

# Field of sglang's arguments -> what it switches on, whether a value does, and the cure.
_UNTESTED: dict[str, tuple[str, Callable[[Any], bool], str]] = {
    "nnodes": ("several nodes", lambda value: (value or 1) > 1, "use --nnodes 1"),
    "pp_size": ("pipeline parallelism", lambda value: (value or 1) > 1, "use --pp-size 1"),
    "speculative_algorithm": ("speculative decoding", bool, "drop --speculative-algorithm"),
    "enable_memory_saver": ("releasing memory at run time", bool, "drop --enable-memory-saver"),
    "disaggregation_mode": (
        "PD disaggregation",
        lambda value: value not in (None, "null"),
        "use --disaggregation-mode null",
    ),
    # Ranks that hear of new weights at different times cannot agree on what they have.
    "enable_dp_attention_local_control_broadcast": (
        "control messages to each replica alone",
        bool,
        "drop --enable-dp-attention-local-control-broadcast and --dwdp-size",
    ),
    "elastic_ep_backend": ("elastic expert parallelism", bool, "drop --elastic-ep-backend"),
    "disable_radix_cache": ("a server without radix cache", bool, "drop --disable-radix-cache"),
}


TIERED_STAGING_RATIO = 0.25
"""Of the pool, for pages on their way to and from storage below tiered pages, where no other is named."""


def store_refusals(args: Any, options: ImportanceOptions) -> list[str]:
    """One line for each reason why ``args`` cannot run with a store; empty where they can."""
    lines, flag = [], name_of("store.directory")
    if getattr(args, "hicache_host_memory_mode", None) not in (None, _host_memory_mode(options)):
        mode = f"this use of host memory (--hicache-host-memory-mode {args.hicache_host_memory_mode})"
        cure = f"use --hicache-host-memory-mode {_host_memory_mode(options)}"
        lines.append(f"{flag} does not support {mode}: {cure}, or drop {flag}")
    for field, (mode, refuses, cure) in _UNTESTED.items():
        if refuses(getattr(args, field, None)):
            lines.append(f"{flag} does not support {mode}: {cure}, or drop {flag}")
    return lines


def store_model_refusals(config: ModelConfig) -> list[str]:
    """One line for each reason why a model cannot run with a store under sglang's own policies.

    The key of a page names an image by 30 bits of its hash: another one may be served from its page.
    """
    found = {
        "multimodal models": config.is_multimodal,
        "encoder-decoder models": config.is_encoder_decoder,
        "embedding and reward models": not config.is_generation,
    }
    flag = name_of("store.directory")
    cure = f"serve a text model that generates, or drop {flag}"
    return [f"{flag} does not support {mode}: {cure}" for mode, on in found.items() if on]


def mount(args: argparse.Namespace, options: ImportanceOptions) -> None:
    """Makes ``args`` start HiCache over our backend.

    Args:
        args: sglang's arguments as given; changed in place.
        options: whose ``store`` is not empty.

    Raises:
        LaunchRefused: the store cannot run here.
    """
    backend = getattr(args, "hicache_storage_backend", None)
    if options.is_tiered:
        args.hicache_host_memory_mode = _host_memory_mode(options)
        if getattr(args, "hicache_ratio", None) is None and not getattr(args, "hicache_size", 0):
            args.hicache_ratio = TIERED_STAGING_RATIO
    lines = store_refusals(args, options)
    if problem := checksum_problem():
        lines.append(problem)
    directory = Path(options.store.directory).expanduser().absolute()
    try:
        check_writable(directory)
    except OSError as error:
        lines.append(
            f"{name_of('store.directory')} {options.store.directory} cannot be written ({error.strerror}): "
            "name a directory on a disk with space that the server may write"
        )
    try:
        given = read_extra_config(getattr(args, "hicache_storage_backend_extra_config", None))
    except (BadJson, OSError) as error:
        lines.append(f"--hicache-storage-backend-extra-config is no object ({error}): correct it")
        given = {}
    if backend is not None and (reason := _backend_refusal(backend, given, options)):
        lines.append(f"--hicache-storage-backend {backend}: {reason}, or drop --hicache-storage-backend")
    if backend is not None and options.store.max_bytes != DEFAULTS["store.max_bytes"]:
        lines.append(
            f"{name_of('store.max_bytes')} has no effect beside --hicache-storage-backend {backend}: "
            "drop it, and give that backend a limit of its own in --hicache-storage-backend-extra-config"
        )
    if options.store.tiers:
        lines += _tier_lines(options, backend)
    if lines:
        raise LaunchRefused(lines)
    args.enable_hierarchical_cache = True
    args.hicache_storage_backend = DYNAMIC
    args.hicache_storage_backend_extra_config = json.dumps(
        {
            **{name: value for name, value in given.items() if name not in _DYNAMIC_SETTINGS},
            "backend_name": "kv_importance_store",
            "module_path": BACKEND_MODULE,
            "class_name": BACKEND_CLASS,
            "interface_v1": 1,
            "hicache_storage_pass_prefix_keys": True,
            "directory": str(directory),
            "budget_bytes": options.store.max_bytes,
            "ranks": _ranks(args),
            "fetch_timeout_ms": options.store.fetch_timeout_ms,
            "tiers": str(Path(options.store.tiers).expanduser().absolute()) if options.store.tiers else None,
            "wrapped": backend,
            "wrapped_config": given,
        }
    )


def _ranks(args: argparse.Namespace) -> int:
    """Of this server, each of which writes; with attention data-parallel, replicas share those of one."""
    tensor_parallel, replicas = getattr(args, "tp_size", None) or 1, getattr(args, "dp_size", None) or 1
    return tensor_parallel * (1 if getattr(args, "enable_dp_attention", False) else replicas)


def _host_memory_mode(options: ImportanceOptions) -> str:
    """A host tier of HiCache's own would hold the pages of a tiered pool, which lie on the host, twice."""
    return "buffer_only" if options.is_tiered else "cache"


def _backend_refusal(backend: str, settings: Mapping[str, Any], options: ImportanceOptions) -> str | None:
    """Why ``backend`` cannot hold verified pages, and what to do; None where it can."""
    if reason := UNUSABLE.get(backend):
        return f"{name_of('store.directory')} cannot use it: {reason}; use file"
    if backend == DYNAMIC:
        if missing := [name for name in _DYNAMIC_SETTINGS[:3] if name not in settings]:
            return f"it needs {', '.join(missing)}: give them in its extra configuration"
    elif backend not in INTERFACES:
        return (
            f"{name_of('store.directory')} does not know it: use one of {', '.join((*INTERFACES, DYNAMIC))}"
        )
    if backend not in TESTED and options.store.backends == "tested":
        return (
            f"{name_of('store.directory')} has not been tested over a real one: "
            f"add {name_of('store.backends')} any to verify its pages all the same, use {' or '.join(TESTED)}"
        )
    return None


def _tier_lines(options: ImportanceOptions, backend: str | None) -> list[str]:
    """One line for each reason why the chain of tiers cannot hold the store's pages."""
    lines = []
    if backend is not None:
        lines.append(
            f"{name_of('store.tiers')} holds the pages itself: drop --hicache-storage-backend {backend}, "
            'or make it the last tier (kind = "hicache")'
        )
    try:
        spec = read_tier_file(Path(options.store.tiers).expanduser())
    except TierFileError as error:
        return [*lines, f"{name_of('store.tiers')} {error}"]
    problems = chain_problems(spec)
    for tier in spec.tiers:
        if tier.backend and (reason := _backend_refusal(tier.backend, tier.config, options)):
            problems.append(f"tier {tier.name}: backend {tier.backend}: {reason}, or take it out")
    return [*lines, *(f"{name_of('store.tiers')} {options.store.tiers}: {line}" for line in problems)]


def install_before_scheduler() -> None:
    """Hooks the storage threads and everything that changes weights, in a scheduler process.

    Raises:
        LaunchRefused: sglang could not hook one of them.
    """
    from sglang_importance.storage.guards import HOOKS

    install_hooks(HOOKS, otherwise=f"drop {name_of('store.directory')}")


def install_on_scheduler(scheduler: Scheduler) -> None:
    """Tells the store which weights the scheduler has loaded; until then it serves nothing."""
    from sglang_importance.storage.weights import WATCH

    if WATCH.current is None:
        WATCH.watch(scheduler)


def live_store(scheduler: Scheduler) -> dict[str, bool]:
    """Each part that a scheduler needs with a store, and whether it is in use."""
    from sglang_importance.storage.backend import VerifiedStorage
    from sglang_importance.storage.guards import HOOKS
    from sglang_importance.storage.weights import WATCH

    controller = getattr(scheduler.tree_cache, "cache_controller", None)
    return {
        "verified store": isinstance(getattr(controller, "storage_backend", None), VerifiedStorage),
        "weights of the store": WATCH.current is not None,
        "guards of the storage threads": all(map(is_applied, HOOKS)),
    }


_DECODERS: dict[str, Callable[[Any], Any]] = {
    ".json": json.loads,
    ".toml": msgspec.toml.decode,
    ".yaml": msgspec.yaml.decode,
    ".yml": msgspec.yaml.decode,
}


def read_extra_config(text: str | None) -> dict[str, Any]:
    """The settings in JSON, or in a JSON, TOML or YAML file whose path follows ``@``; dates become text.

    The forms are those of ``HybridCacheController.parse_storage_backend_extra_config`` in sglang 0.5.21.

    Raises:
        BadJson: it cannot be read as what it is, or is no object.
        OSError: the file cannot be read.
    """
    if not text:
        return {}
    if not text.startswith("@"):
        config = decode_json(json.loads, text)
    else:
        path = Path(text[1:])
        decode = _DECODERS.get(path.suffix.lower())
        if decode is None:
            raise BadJson(f"{path} ends in none of {', '.join(_DECODERS)}")
        config = msgspec.to_builtins(decode_json(decode, path.read_bytes()), str_keys=True)
    if not isinstance(config, dict):
        raise BadJson(f"it is of type {type(config).__name__}")
    return config

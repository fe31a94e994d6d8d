"""The weights that the pages of this process were computed with, told from others by a fingerprint."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from sgl_importance.storage.store_counters import StoreCounters

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from torch.distributed import ProcessGroup

CHUNK_WORDS = 1 << 20
"""Words that are summed at a time: some 40 MB with what comes of them, where the KV pool took the rest."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights in memory that nobody is changing.

    Attributes:
        fingerprint: of every parameter and buffer of all ranks.
        version: the operator's label.
        config: digest of the model's configuration.
        pages_match: whether every page in memory was computed with them. Not so after an update without
            flush, until the cache is reset: such pages must not be stored as theirs.
    """

    fingerprint: str
    version: str
    config: str
    pages_match: bool


class WeightsWatch:
    """The weights of one scheduler process; read by storage threads, changed by the scheduler thread.

    ``current`` is None before a model is loaded and while its weights are being changed.
    """

    def __init__(self) -> None:
        self.current: Weights | None = None
        self.counters = StoreCounters()
        self._before: Weights | None = None
        self._read: Callable[[], Weights] | None = None

    def watch(self, scheduler: Scheduler) -> None:
        """Starts with the model that the scheduler has just loaded; all ranks of its group call this."""

        def read(pages_match: bool) -> Weights:
            runner = scheduler.tp_worker.model_runner
            return Weights(
                fingerprint=fingerprint_of_ranks(server_fingerprint(runner), scheduler.tp_cpu_group),
                version=str(_weight_version()),
                config=config_digest(runner.model_config),
                pages_match=pages_match,
            )

        self._read = lambda: read(pages_match=_nothing_is_cached(scheduler))
        self.current = read(pages_match=True)

    def changing(self) -> None:
        """The weights are about to change: nothing is read or written until they have."""
        self._before, self.current = self.current, None

    def changed(self) -> None:
        """The weights are complete, since the last ``changing`` or for some time; on all ranks at once."""
        before, after = self._before, self._read() if self._read is not None else None
        # None where requests may have been served between several changes, with weights that are neither.
        if before is not None and after is not None:
            matched = replace(after, pages_match=True)
            if replace(before, pages_match=True) == matched:  # an update that was refused
                self.current = matched if before.pages_match else after
                return
        self.counters.add("weight_updates")
        self.current = after

    def cache_was_reset(self) -> None:
        """Every page of other weights has left the memory."""
        if self.current is not None and not self.current.pages_match:
            current = self.current
            self.current = Weights(current.fingerprint, current.version, current.config, pages_match=True)


WATCH = WeightsWatch()


def fingerprint_of_ranks(own: str, group: ProcessGroup) -> str:
    """``own`` of a rank that is alone, else one digest for all: KV of each comes of the shards of all.

    All ranks of the group call this at the same points, replicas behind data-parallel attention included.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return own
    of_each: list[str] = [""] * ranks
    dist.all_gather_object(of_each, own, group=group)
    return blake2b(" ".join(of_each).encode(), digest_size=16).hexdigest()


def server_fingerprint(runner: Any) -> str:
    """The fingerprint of the model, of its LoRA adapters and of its quantized KV cache, where it has any.

    An adapter of ``--lora-paths`` keeps its name for pages when its files have changed. One that is loaded
    later has a name that was never used before.
    """
    manager = getattr(runner, "lora_manager", None)
    own = fingerprint(runner.model)
    if runner.kv_cache_dtype.itemsize == 1:
        own = _quantized(own, runner)
    if manager is None or not manager.loras:
        return own
    digest = blake2b(own.encode(), digest_size=16)
    for lora_id, adapter in sorted(manager.loras.items()):
        parts = [layer.weights for layer in adapter.layers]
        for number, part in enumerate([*parts, adapter.embedding_layers, adapter.added_tokens_embeddings]):
            for name, tensor in sorted(part.items()):
                digest.update(f"{lora_id} {adapter.scaling} {number} {name} {tuple(tensor.shape)}".encode())
                digest.update(_sums(tensor))
    return digest.hexdigest()


def _quantized(own: str, runner: Any) -> str:
    """The fingerprint where keys and values have one byte: their format and scales say what it means.

    A pool calls every such format uint8; scales of ``--quantization-param-path`` are plain numbers.
    """
    digest = blake2b(f"{own} {runner.kv_cache_dtype}".encode(), digest_size=16)
    for name, module in sorted(runner.model.named_modules(), key=lambda item: item[0]):
        for scale in ("k_scale", "v_scale"):
            if (value := getattr(module, scale, None)) is not None:
                digest.update(f"{name} {scale} {float(value)!r}".encode())
    return digest.hexdigest()


def fingerprint(model: torch.nn.Module) -> str:
    """32 hexadecimal digits that differ wherever a parameter or buffer differs, on any device.

    Integer sums, wrapped at 64 bits, so that neither order nor device matters: one plain, which any single
    change moves, and one weighted by position, which exchanged values move. No protection against forgery.
    """
    digest = blake2b(digest_size=16)
    for name, tensor in sorted(
        chain(model.named_parameters(), model.named_buffers()), key=lambda item: item[0]
    ):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_sums(tensor))
    return digest.hexdigest()


def _sums(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach()
    if tensor.ndim == 2 and tensor.t().is_contiguous():
        tensor = tensor.t()  # as fp8 weights lie for a product; where it lies it needs no copy
    data = tensor.contiguous().view(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    tail = bytes(data[whole:].tolist())
    words = data[:whole]
    if words.storage_offset() % 8:
        words = words.clone()
    words = words.view(torch.int64)
    plain = torch.zeros((), dtype=torch.int64, device=data.device)
    weighted = torch.zeros_like(plain)
    for start in range(0, words.numel(), CHUNK_WORDS):
        chunk = words[start : start + CHUNK_WORDS]
        position = torch.arange(start, start + chunk.numel(), device=data.device)
        plain += chunk.sum()
        weighted += (chunk * (2 * position + 1)).sum()
    return struct.pack("<qq", int(plain), int(weighted)) + tail


def config_digest(model_config: Any) -> str:
    """Digest of what the model's configuration says about its computation; its path is no part of it."""
    facts = dict(model_config.hf_config.to_dict())
    for name in ("_name_or_path", "name_or_path", "transformers_version"):
        facts.pop(name, None)
    described = repr(sorted((key, repr(value)) for key, value in facts.items()))
    return blake2b(f"{described} {model_config.dtype}".encode(), digest_size=16).hexdigest()


def _weight_version() -> object:
    from sglang.srt.runtime_context import get_serving

    return get_serving().weight_version


def _nothing_is_cached(scheduler: Scheduler) -> bool:
    cache: Any = scheduler.tree_cache  # of any class, and an object in sglang's annotations
    tokens = cache.total_size()
    empty = not any(tokens) if isinstance(tokens, tuple) else not tokens
    # Those are on the device. The host, where there is one, may have more of the tree, and what came for a
    # request that waits; on the device such a request holds nothing.
    if (controller := getattr(cache, "cache_controller", None)) is not None:
        host = controller.mem_pool_host
        empty = empty and host.available_size() == host.logical_size
    return empty and scheduler.is_fully_idle(ignore_waiting=True)

"""A small host pool whose pages are records: what backends of upstream read and write instead of KV pages.

Backends that move whole pages of the host pool leave no room for a checksum. So they get a pool of our own,
of the kind that all of them support (one layer, one head, one token per page), whose pages are a header and a
page of KV cache. A read that comes too late lands there too, and not in host memory that has been given away.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.storage import StorageBackendFactory

from sgl_importance.storage.page_record import HEADER_BYTES
from sgl_importance.storage.pages import Page
from sglang_importance.upstream.differences import host_pool

# Direct I/O wants each half of a record on pages of the operating system.
HALF_ALIGNMENT = 4096


@contextmanager
def _no_kernels_built() -> Iterator[None]:
    """On CUDA a host pool builds the kernels that copy its rows to a device, where these never go."""
    from sglang.srt.mem_cache.pool_host import mha  # which the HTTP process does not need

    asked = ("can_use_hicache_jit_kernel", "can_use_write_back_jit_kernel")
    kept = {name: getattr(mha, name) for name in asked}
    try:
        for name in asked:
            setattr(mha, name, lambda **_: False)
        yield
    finally:
        for name, function in kept.items():
            setattr(mha, name, function)


class StagingPool:
    """``slots`` records of a header and a page of ``page_bytes``.

    A record fills the K half of its slot and goes on in the V half; what is left over is zero.

    Args:
        slots: at least one.
        page_bytes: of a page of KV cache.
        allocator: of upstream, by the backend's name: some must own the memory they move.
    """

    def __init__(self, slots: int, page_bytes: int, *, allocator: str, pin_memory: bool) -> None:
        assert slots > 0
        self.page_bytes = page_bytes
        self._half = -(-(HEADER_BYTES + page_bytes) // (2 * HALF_ALIGNMENT)) * HALF_ALIGNMENT
        device = MHATokenToKVPool(
            size=1,
            page_size=1,
            dtype=torch.uint8,
            head_num=1,
            head_dim=self._half,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
            enable_alt_stream=False,
        )
        with _no_kernels_built():
            self.pool = host_pool(
                device, float(slots), 1, "page_first", pin_memory=pin_memory, allocator=allocator
            )
        self.pool.kv_buffer.zero_()
        self._data: NDArray[np.uint8] = self.pool.kv_buffer.numpy().reshape(2, -1, self._half)
        assert self._data.shape[1] >= slots

    @property
    def record_bytes(self) -> int:
        """Size of a slot in bytes."""
        return 2 * self._half

    def put(self, slot: int, header: bytes, body: Page) -> None:
        """Writes a record into a slot."""
        first, second = self._data[:, slot]
        split = self._half - HEADER_BYTES
        first[:HEADER_BYTES] = np.frombuffer(header, np.uint8)
        first[HEADER_BYTES : HEADER_BYTES + len(body)] = body[:split]
        second[: max(0, len(body) - split)] = body[split:]

    def take(self, slot: int, body: Page) -> bytes:
        """Copies the page of a slot into ``body`` [page bytes]; its header, unchecked."""
        first, second = self._data[:, slot]
        split = self._half - HEADER_BYTES
        body[:split] = first[HEADER_BYTES : HEADER_BYTES + len(body)]
        body[split:] = second[: max(0, len(body) - split)]
        header: bytes = first[:HEADER_BYTES].tobytes()
        return header

    def record(self, slot: int) -> NDArray[np.uint8]:
        """A copy of a slot [record bytes]."""
        return self._data[:, slot].reshape(-1).copy()


def create_backend(
    name: str, config: HiCacheStorageConfig, settings: dict[str, Any], staging: StagingPool
) -> HiCacheStorage:
    """The backend that upstream knows as ``name``, over a pool of records instead of the host pool.

    Args:
        settings: the operator's own extra configuration for it.
    """
    # Records look the same whatever the model: one K and one V half, of this rank.
    config = replace(
        config,
        extra_config=settings,
        is_mla_model=False,
        is_page_first_layout=True,
        should_split_heads=False,
        tp_lcm_size=None,
    )
    backend = StorageBackendFactory.create_backend(name, config, staging.pool)
    backend.register_mem_pool_host(staging.pool)
    return backend


def answers_of(answer: Any, count: int) -> list[bool]:
    """One flag for each of ``count`` records; backends give one for each, for each half, or one for all.

    Raises:
        OSError: another number of flags.
    """
    if answer is None or isinstance(answer, bool):
        return [bool(answer)] * count
    flags = [bool(flag) for flag in answer]
    halves = 2 if len(flags) == 2 * count else 1
    if len(flags) != halves * count:
        raise OSError(errno.EIO, f"the backend answered for {len(flags)} pages instead of {count}")
    return [all(flags[index * halves : (index + 1) * halves]) for index in range(count)]

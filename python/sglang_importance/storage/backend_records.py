"""Records one by one in a backend of upstream: by value, or through slots of a small host pool of ours."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig

from sgl_importance.storage.page_record import HEADER_BYTES, MissReason, PageDamaged
from sgl_importance.storage.tier_chain.kinds.backend_tier import RecordBackend
from sglang_importance.storage.interfaces import Interface, interface_of
from sglang_importance.storage.page_buffers import StagingPool, answers_of, create_backend

logger = logging.getLogger(__name__)

LOOKED_FOR = 128
"""Keys of one look, as upstream asks for them."""
_READ, _WRITE = 0, 1
"""Slots of a host pool, for one record each."""


class _Records:
    """What is the same for both ways of moving records."""

    def __init__(self, backend: HiCacheStorage) -> None:
        self._backend = backend

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Of each key, whether there is a record; upstream only says how many of the first there are."""
        found: list[bool] = []
        while len(found) < len(keys):
            asked = list(keys[len(found) : len(found) + LOOKED_FOR])
            there = min(int(self._backend.batch_exists(asked)), len(asked))
            found += [True] * there + [False] * (there < len(asked))
        return found

    def close(self) -> None:
        if hasattr(self._backend, "close"):
            self._backend.close()


class ValueRecords(_Records):
    """Records in a backend that stores tensors by name; see ``RecordBackend``.

    Args:
        backend: of upstream, with ``get``, ``set`` and ``batch_exists``.
        block_bytes: of every tensor, where the backend wants one size; it may be longer than a record.
    """

    def __init__(self, backend: HiCacheStorage, block_bytes: int | None = None) -> None:
        super().__init__(backend)
        self._block_bytes = block_bytes

    def get(self, key: str, record: NDArray[np.uint8]) -> bool:
        block = record if self._block_bytes is None else np.zeros(self._block_bytes, np.uint8)
        target = torch.from_numpy(block)
        try:
            found = self._backend.get(key, target)
        except OSError as error:
            if error.errno is not None:
                raise
            raise PageDamaged(MissReason.TRUNCATED) from error  # as upstream's file backend says it
        if found is None:
            return False
        if found is not target and torch.is_tensor(found):
            block = found.flatten().view(torch.uint8).numpy()
            if block.nbytes != target.nbytes:
                raise PageDamaged(MissReason.LENGTH)
        if block is not record:
            record[:] = block[: record.nbytes]
        return True

    def put(self, key: str, record: NDArray[np.uint8]) -> bool:
        block = record
        if self._block_bytes is not None:
            block = np.zeros(self._block_bytes, np.uint8)
            block[: record.nbytes] = record
        return bool(self._backend.set(key, torch.from_numpy(block)))


class StagedRecords(_Records):
    """Records in a backend that moves whole pages of a host pool; see ``RecordBackend``.

    Upstream calls each method of such a backend from one thread. So does this.

    Args:
        backend: of upstream, with ``batch_exists``, ``batch_get_v1`` and ``batch_set_v1``, over ``staging``.
        staging: of two slots.
    """

    def __init__(self, backend: HiCacheStorage, staging: StagingPool) -> None:
        super().__init__(backend)
        self._staging = staging
        self._reading, self._writing = threading.Lock(), threading.Lock()

    def get(self, key: str, record: NDArray[np.uint8]) -> bool:
        with self._reading:
            (found,) = answers_of(self._backend.batch_get_v1([key], torch.tensor([_READ])), 1)
            if found:
                header = self._staging.take(_READ, record[HEADER_BYTES:])
                record[:HEADER_BYTES] = np.frombuffer(header, np.uint8)
        return found

    def put(self, key: str, record: NDArray[np.uint8]) -> bool:
        with self._writing:
            if self.present([key]) == [True]:
                return True
            self._staging.put(_WRITE, record[:HEADER_BYTES].tobytes(), record[HEADER_BYTES:])
            (stored,) = answers_of(self._backend.batch_set_v1([key], torch.tensor([_WRITE])), 1)
        return stored


def open_records(
    name: str,
    settings: dict[str, Any],
    config: HiCacheStorageConfig,
    *,
    size: int,
    capacity: int,
    pin_memory: bool,
) -> RecordBackend:
    """The backend that upstream knows as ``name``, for records of ``size`` bytes.

    Args:
        settings: the operator's own for it.
        capacity: bytes of the tier.
    """
    interface = interface_of(name, settings)
    staging = StagingPool(2, size - HEADER_BYTES, allocator=name, pin_memory=pin_memory)
    backend = create_backend(name, config, settings, staging)
    if name == "file" and (folder := getattr(backend, "file_path", "")):
        os.makedirs(folder, exist_ok=True)  # upstream has the first rank make it, who may come later
    warn_of_its_limit(name, backend, capacity)
    if interface is Interface.ZERO_COPY:
        return StagedRecords(backend, staging)
    return ValueRecords(backend, staging.record_bytes if interface is Interface.BLOCKS else None)


def warn_of_its_limit(name: str, backend: HiCacheStorage, capacity: int | None) -> None:
    """Upstream's file backend says whether it has a limit; of others nobody knows.

    Args:
        capacity: bytes of the tier that lies in it; None where there are no tiers.
    """
    evictor = getattr(backend, "_evictor", None)
    most, free = (getattr(evictor, limit, None) for limit in ("max_size_bytes", "min_free_bytes"))
    if most is None or free is None:
        return
    if not (most or free):
        logger.warning(
            "KV importance %s: the backend %s has no max_size that it can read and will grow without end: "
            "give it one %s",
            "store" if capacity is None else "tiers",
            name,
            """in --hicache-storage-backend-extra-config, such as '{"max_size": "200G"}'"""
            if capacity is None
            else 'above the capacity of its tier, such as config = { max_size = "200G" }',
        )
    elif capacity is not None and 0 < most < capacity:
        logger.warning(
            "KV importance tiers: the backend %s keeps %d bytes and its tier counts on %d: give it more, or "
            "the tier less",
            name,
            most,
            capacity,
        )

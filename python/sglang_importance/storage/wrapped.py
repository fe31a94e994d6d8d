"""Verified pages inside a backend of upstream, each with its header in front."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.storage import StorageBackendFactory

from sgl_importance.storage.counters import StoreCounters
from sgl_importance.storage.record import (
    HEADER_BYTES,
    MissReason,
    PageDamaged,
    PageMiss,
    check_page,
    encode_header,
    page_digest,
)
from sgl_importance.storage.store import PageStore
from sgl_importance.storage.transfer import Page

OUR_SETTINGS = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "directory",
        "budget_bytes",
        "fetch_timeout_ms",
        "wrapped",
    }
)


class WrappedPages:
    """Records under names of our own in a backend that stores tensors by name.

    Upstream's interface cannot delete: the name of a damaged record is given up, and its page gets another.

    Args:
        backend: of upstream, with ``get``, ``set`` and ``exists``.
        store: whose quarantine takes damaged records.
        counters: counts them.
    """

    def __init__(self, backend: HiCacheStorage, store: PageStore, counters: StoreCounters) -> None:
        self._backend = backend
        self._quarantine = store.quarantine
        self._counters = counters
        self._lock = threading.Lock()
        self._given_up: Counter[tuple[bytes, str]] = Counter()

    @classmethod
    def create(
        cls,
        name: str,
        config: HiCacheStorageConfig,
        host_pool: Any,
        store: PageStore,
        counters: StoreCounters,
    ) -> WrappedPages:
        """Builds the backend that upstream knows as ``name``, with the operator's own settings for it."""
        settings = {
            key: value for key, value in (config.extra_config or {}).items() if key not in OUR_SETTINGS
        }
        backend = StorageBackendFactory.create_backend(
            name, replace(config, extra_config=settings), host_pool
        )
        return cls(backend, store, counters)

    def exists(self, identity: bytes, key: str) -> bool:
        return bool(self._backend.exists(self._name(identity, key)))

    def read(self, identity: bytes, key: str, body: Page) -> None:
        """As ``PageStore.read``."""
        record = torch.empty(HEADER_BYTES + body.nbytes, dtype=torch.uint8)
        try:
            found = self._backend.get(self._name(identity, key), record)
        except OSError as error:
            self._give_up(identity, key, record, MissReason.TRUNCATED)
            raise PageDamaged(MissReason.TRUNCATED) from error
        if found is None:
            raise PageMiss(MissReason.ABSENT)
        data = record.numpy()
        body[:] = data[HEADER_BYTES:]
        try:
            check_page(data[:HEADER_BYTES].tobytes(), body, page=page_digest(key), identity=identity)
        except PageDamaged as damaged:
            self._give_up(identity, key, record, damaged.reason)
            raise

    def write(self, identity: bytes, key: str, body: Page, *, depth: int, moment: int) -> bool:
        """As ``PageStore.write``."""
        if self.exists(identity, key):
            return False
        header = encode_header(page=page_digest(key), identity=identity, depth=depth, body=body)
        record = torch.from_numpy(np.concatenate([np.frombuffer(header, np.uint8), body]))
        if not self._backend.set(self._name(identity, key), record):
            raise OSError(errno.EIO, "the backend stored nothing")
        return True

    def touch(self, identity: bytes, keys: list[str], moment: int) -> None:
        """Nothing: the backend keeps its own recency."""

    def _name(self, identity: bytes, key: str) -> str:
        name = f"{identity.hex()[:32]}{page_digest(key).hex()}"
        with self._lock:
            attempt = self._given_up[identity, key]
        return f"{name}-{attempt}" if attempt else name

    def _give_up(self, identity: bytes, key: str, record: torch.Tensor, reason: MissReason) -> None:
        name = self._name(identity, key)
        with self._lock:
            self._given_up[identity, key] += 1
        self._counters.add("quarantined_pages")
        with suppress(OSError):
            self._quarantine.mkdir(parents=True, exist_ok=True)
            (self._quarantine / f"{reason.value}-{name}").write_bytes(record.numpy().tobytes())

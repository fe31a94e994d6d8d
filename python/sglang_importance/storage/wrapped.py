"""Verified pages inside a backend of upstream, each with its header in front."""

from __future__ import annotations

import errno
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from sgl_importance.storage.page_record import (
    DIGEST_BYTES,
    HEADER_BYTES,
    MissReason,
    PageDamaged,
    PageMiss,
    check_page,
    encode_header,
    page_digest,
)
from sgl_importance.storage.pages import UNREADABLE, Lanes, Page, PageByPage
from sgl_importance.storage.store import copy_aside
from sgl_importance.storage.store_counters import StoreCounters
from sglang_importance.storage.backend_records import ValueRecords
from sglang_importance.storage.page_buffers import StagingPool, answers_of

BATCH_BYTES = 16 << 20
BATCH_PAGES = 128  # as upstream
_LANES = Lanes(look=1, read=2, write=2)


class Names:
    """The names of records: a digest of model and page, in hexadecimal like upstream's own keys.

    Upstream's interface cannot delete: the name of a damaged record is given up, and its page gets another.

    Args:
        quarantine: folder that takes copies of damaged records.
        counters: counts them.
    """

    def __init__(self, quarantine: Path, counters: StoreCounters) -> None:
        self._quarantine = quarantine
        self._counters = counters
        self._lock = threading.Lock()
        self._given_up: Counter[tuple[bytes, str]] = Counter()

    def of(self, identity: bytes, key: str) -> str:
        with self._lock:
            attempt = self._given_up[identity, key]
        parts = identity + page_digest(key) + attempt.to_bytes(4, "little")
        return blake2b(parts, digest_size=DIGEST_BYTES).hexdigest()

    def give_up(
        self, identity: bytes, key: str, record: NDArray[np.uint8] | None, reason: MissReason
    ) -> None:
        """Its ``record`` is kept for people; None where it cannot be read."""
        if record is not None:
            copy_aside(record, self.of(identity, key), self._quarantine, reason)
        with self._lock:
            self._given_up[identity, key] += 1
        self._counters.add("quarantined_pages")


class ValuePages(PageByPage):
    """Records in a backend that stores tensors by name.

    Args:
        backend: of upstream, with ``get``, ``set`` and ``exists``.
        block_bytes: as for ``ValueRecords``.
    """

    def __init__(self, backend: HiCacheStorage, names: Names, block_bytes: int | None = None) -> None:
        self._backend = backend
        self._records = ValueRecords(backend, block_bytes)
        self._names = names

    def exists(self, identity: bytes, key: str) -> bool:
        return bool(self._backend.exists(self._names.of(identity, key)))

    def read(self, identity: bytes, key: str, body: Page) -> None:
        record = np.zeros(HEADER_BYTES + body.nbytes, np.uint8)
        try:
            if not self._records.get(self._names.of(identity, key), record):
                raise PageMiss(MissReason.ABSENT)
            body[:] = record[HEADER_BYTES:]
            check_page(record[:HEADER_BYTES].tobytes(), body, page=page_digest(key), identity=identity)
        except PageDamaged as damaged:
            self._names.give_up(identity, key, record, damaged.reason)
            raise
        except OSError as error:
            if error.errno in UNREADABLE:
                self._names.give_up(identity, key, None, MissReason.IO)
            raise PageMiss(MissReason.IO) from error

    def write(self, identity: bytes, key: str, body: Page, *, depth: int, moment: int) -> bool:
        if self.exists(identity, key):
            return False
        record = np.empty(HEADER_BYTES + body.nbytes, np.uint8)
        header = encode_header(page=page_digest(key), identity=identity, depth=depth, body=body)
        record[:HEADER_BYTES] = np.frombuffer(header, np.uint8)
        record[HEADER_BYTES:] = body
        if not self._records.put(self._names.of(identity, key), record):
            raise OSError(errno.EIO, "the backend stored nothing")
        return True

    def touch(self, identity: bytes, keys: list[str], moment: int) -> None:
        """Nothing: the backend keeps its own recency."""


class ZeroCopyPages:
    """Records in a backend that moves whole pages of a host pool: here, of a ``StagingPool``.

    Upstream calls each method of a backend from one thread. So does this: while one thread is inside the
    backend, the next verifies and copies what the backend has brought before.

    Args:
        backend: of upstream, with ``batch_exists``, ``batch_get_v1`` and ``batch_set_v1``, over ``staging``.
        staging: of ``slots_for`` slots.
    """

    touch_holds_seconds = 0.0  # a touch does nothing

    def __init__(self, backend: HiCacheStorage, names: Names, staging: StagingPool) -> None:
        self._backend = backend
        self._names = names
        self._staging = staging
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self._batch = self.run_pages(staging.page_bytes)
        starts = iter(range(0, self.slots_for(staging.page_bytes), self._batch))
        self._free_reads = _slots(starts, _LANES.read)
        self._free_writes = _slots(starts, _LANES.write)

    @classmethod
    def slots_for(cls, page_bytes: int) -> int:
        """Slots with which no lane ever waits for another's."""
        return (_LANES.read + _LANES.write) * cls.run_pages(page_bytes)

    def lanes(self, page_bytes: int) -> Lanes:
        return _LANES

    @staticmethod
    def run_pages(page_bytes: int) -> int:
        return max(1, min(BATCH_PAGES, BATCH_BYTES // page_bytes))

    def count_present(self, identity: bytes, keys: Sequence[str]) -> int:
        return int(self._backend.batch_exists([self._names.of(identity, key) for key in keys]))

    def read_run(self, identity: bytes, keys: Sequence[str], stage: Callable[[], Page]) -> Iterator[Page]:
        with _taken(self._free_reads) as start:
            slots = torch.arange(start, start + len(keys))
            with self._reading:
                answer = self._backend.batch_get_v1([self._names.of(identity, key) for key in keys], slots)
            for index, (key, found) in enumerate(zip(keys, answers_of(answer, len(keys)), strict=True)):
                if not found:
                    raise PageMiss(MissReason.ABSENT)
                body = stage()
                header = self._staging.take(start + index, body)
                try:
                    check_page(header, body, page=page_digest(key), identity=identity)
                except PageDamaged as damaged:
                    self._names.give_up(identity, key, self._staging.record(start + index), damaged.reason)
                    raise
                yield body

    def write_run(
        self,
        identity: bytes,
        keys: Sequence[str],
        bodies: Sequence[Page],
        *,
        before: str | None,
        depth: int,
        moment: int,
    ) -> list[bool | Exception]:
        names = [self._names.of(identity, key) for key in keys]
        with _taken(self._free_writes) as start:
            for index, (key, body) in enumerate(zip(keys, bodies, strict=True)):
                header = encode_header(
                    page=page_digest(key), identity=identity, depth=depth + index, body=body
                )
                self._staging.put(start + index, header, body)
            with self._writing:
                there = int(self._backend.batch_exists(names))
                outcomes: list[bool | Exception] = [False] * there
                if there < len(names):
                    slots = torch.arange(start + there, start + len(names))
                    answer = self._backend.batch_set_v1(names[there:], slots)
                    nothing = OSError(errno.EIO, "the backend stored nothing")
                    outcomes += [stored or nothing for stored in answers_of(answer, len(names) - there)]
        return outcomes

    def touch(self, identity: bytes, keys: list[str], moment: int) -> None:
        """Nothing: the backend keeps its own recency."""


def _slots(starts: Iterator[int], count: int) -> queue.SimpleQueue[int]:
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for _ in range(count):
        free.put(next(starts))
    return free


@contextmanager
def _taken(free: queue.SimpleQueue[int]) -> Iterator[int]:
    """The first slot of a batch, which nobody else uses until the backend is done with it."""
    start = free.get_nowait()  # there is one for each lane
    try:
        yield start
    finally:
        free.put(start)

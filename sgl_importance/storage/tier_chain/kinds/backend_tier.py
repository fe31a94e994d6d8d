"""A tier in a storage backend of HiCache, of which nothing is known but that it stores and gives back by key.

Such a backend neither deletes nor lists. A folder of this machine keeps which records of ours are in it. A
record that the chain deletes leaves that list and stays in the backend until the backend evicts it by itself:
what the chain counts is a lower bound of what the backend holds. So the tier may only be the last of a chain.

The key of a record is a digest of what the index says of it, so under one key there are never other bytes: a
page that comes down again, after it came up, finds its record where it was.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Protocol, TypeVar

import numpy as np

from sgl_importance.storage.page_record import DIGEST_BYTES, HEADER_BYTES, MissReason, PageDamaged
from sgl_importance.storage.tier_chain.kinds.record_index import RecordIndex, entry_data
from sgl_importance.storage.tier_chain.kinds.tier import StorageTier
from sgl_importance.storage.tier_chain.kinds.tier_record import Bytes, Listed, PageName

Answer = TypeVar("Answer")


class RecordBackend(Protocol):
    """What a backend of HiCache does for us; it may raise whatever it likes."""

    def put(self, key: str, record: Bytes) -> bool:
        """Stores a record [bytes], unless there is one of this key; False where it stored nothing."""
        ...

    def get(self, key: str, record: Bytes) -> bool:
        """Reads a record into ``record`` [bytes], unchecked; False where there is none.

        Raises:
            PageDamaged: what there is has another size.
        """
        ...

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Of each key, whether there is a record."""
        ...

    def close(self) -> None: ...


class BackendTier(StorageTier):
    """Records in a backend of HiCache, below keys of their own.

    Args:
        name: of the backend, for people.
        index: of this rank. Without it, what the backend holds is not found again.
        size: of a record.
        backend: which is closed with the tier.

    Raises:
        OSError: the backend stores nothing.
    """

    makes_room = False

    def __init__(self, name: str, index: RecordIndex, size: int, backend: RecordBackend) -> None:
        self.note = f"in HiCache's backend {name}, which deletes nothing when asked to"
        self._name = name
        self._size = size
        self._backend = backend
        self._index = index
        self._keys: dict[PageName, str] = {}
        self._spoilt: Counter[bytes] = Counter()
        """Of entries whose record was damaged, how often; a backend keeps what it has of a key."""
        self._sign_of_life = self._key(b"")
        if not self._answers():
            raise OSError(errno.EIO, f"the backend {name} stores nothing")

    def put(self, name: PageName, record: Bytes) -> None:
        data = entry_data(record)
        key = self._key(data)
        if not self._asked(lambda: self._backend.put(key, record)):
            full = self._answers()
            raise OSError(errno.ENOSPC if full else errno.EIO, f"the backend {self._name} stored nothing")
        # In this order: a kill in between leaves a record that nobody knows, like those that were deleted.
        self._index.add(name, data)
        self._keys[name] = key

    def get(self, name: PageName, record: Bytes) -> None:
        key = self._keys.get(name)
        if key is None:
            raise FileNotFoundError
        try:
            found = self._asked(lambda: self._backend.get(key, record))
        except PageDamaged:
            record[:HEADER_BYTES] = 0  # no record of this size: its check says so
            return
        if not found:
            if self._answers():
                raise FileNotFoundError
            raise OSError(errno.EIO, f"the backend {self._name} does not answer")

    def delete(self, name: PageName) -> None:
        self._keys.pop(name, None)
        self._index.remove(name)

    def contains(self, name: PageName) -> bool:
        key = self._keys.get(name)
        return key is not None and self._asked(lambda: self._backend.present([key])) == [True]

    def records(self) -> Iterator[Listed]:
        self._keys.clear()
        for found in self._index.entries(self._size):
            keys = ["" if entry is None else self._key(entry.data) for _, entry in found]
            known = [key for key in keys if key]
            present = {key for key, there in zip(known, self._present(known), strict=True) if there}
            for (path, entry), key in zip(found, keys, strict=True):
                if entry is not None and key in present:
                    self._keys[entry.listed.name] = key
                    yield entry.listed
                else:
                    path.unlink(missing_ok=True)

    def set_aside(self, name: PageName, reason: MissReason) -> bool:
        entry = self._index.find(name)
        if entry is not None:
            self._spoilt[entry.data] += 1
        self.delete(name)
        return False

    def close(self) -> None:
        with suppress(Exception):
            self._backend.close()

    def _key(self, data: bytes) -> str:
        attempt = self._spoilt[data].to_bytes(4, "little")
        parts = self._index.prefix.encode() + self._size.to_bytes(8, "little") + attempt + data
        return blake2b(parts, digest_size=DIGEST_BYTES).hexdigest()

    def _present(self, keys: Sequence[str]) -> list[bool]:
        return self._asked(lambda: self._backend.present(keys)) if keys else []

    def _answers(self) -> bool:
        """Whether the backend does anything at all.

        HiCache's interface has one answer for a record that is not there and for a backend that cannot be
        reached, and one for a backend that is full and for one that is broken. So a record is kept there that
        is always to be had.
        """
        key = self._sign_of_life
        with suppress(Exception):
            return self._backend.present([key]) == [True] or self._backend.put(
                key, np.zeros(self._size, np.uint8)
            )
        return False

    def _asked(self, call: Callable[[], Answer]) -> Answer:
        """
        Raises:
            OSError: whatever the backend raised.
        """
        try:
            return call()
        except (OSError, PageDamaged):
            raise
        except Exception as error:
            raise OSError(errno.EIO, f"the backend {self._name}: {type(error).__name__}: {error}") from error

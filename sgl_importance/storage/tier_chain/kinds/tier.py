"""The interface of a tier: records by name, with one that writes and many that read."""

from __future__ import annotations

import errno
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np

from sgl_importance.storage.page_record import HEADER_BYTES, MissReason
from sgl_importance.storage.tier_chain.kinds.tier_record import (
    LINK_BYTES,
    Bytes,
    Listed,
    PageName,
    list_record,
)

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a medium that is full, or whose owner may have no more of it."""


class StorageTier(ABC):
    """Records of one size.

    ``put`` and ``delete`` are called by one thread at a time, ``get`` by any, at any moment. Whatever the
    medium refuses is an ``OSError``.
    """

    note = ""
    """What an operator should know of how it works here; empty where there is nothing."""
    makes_room = True
    """Whether a record that is deleted leaves room for another."""

    @abstractmethod
    def put(self, name: PageName, record: Bytes) -> None:
        """Stores a record, whole or not at all: a killed process leaves none that looks like one.

        Raises:
            OSError: it could not be stored.
        """

    @abstractmethod
    def get(self, name: PageName, record: Bytes) -> None:
        """Reads a record into ``record``, unchecked.

        Raises:
            FileNotFoundError: there is none.
            OSError: it could not be read.
        """

    @abstractmethod
    def delete(self, name: PageName) -> None:
        """Deletes a record; one that is not there is deleted already."""

    @abstractmethod
    def contains(self, name: PageName) -> bool: ...

    @abstractmethod
    def records(self) -> Iterator[Listed]:
        """Every record whose header is intact; others are deleted on the way."""

    def set_aside(self, name: PageName, reason: MissReason) -> bool:
        """Takes a damaged record out, and keeps it for people where the medium can; whether it was kept."""
        self.delete(name)
        return False

    def describe(self, identity: bytes, facts: str) -> None:  # noqa: B027 -- where people look into it
        """Keeps beside the records of a model what it is, as JSON, for people."""

    def close(self) -> None:  # noqa: B027 -- most have nothing to close
        """Nobody uses the tier any more; what it keeps, it keeps."""


class DramTier(StorageTier):
    """Memory of the process, which ends with it."""

    note = "empty after a restart"

    def __init__(self) -> None:
        self._records: dict[PageName, Bytes] = {}

    def put(self, name: PageName, record: Bytes) -> None:
        try:
            self._records[name] = record.copy()
        except MemoryError as error:
            raise OSError(str(error)) from error

    def get(self, name: PageName, record: Bytes) -> None:
        stored = self._records.get(name)
        if stored is None:
            raise FileNotFoundError
        record[:] = stored

    def delete(self, name: PageName) -> None:
        self._records.pop(name, None)

    def contains(self, name: PageName) -> bool:
        return name in self._records

    def records(self) -> Iterator[Listed]:
        for record in list(self._records.values()):
            listed = list_record(record[:HEADER_BYTES].tobytes(), record[-LINK_BYTES:].tobytes())
            if listed is not None:
                yield listed

    def close(self) -> None:
        self._records.clear()


class Scratch(threading.local):
    """A buffer [size] for each thread; a fresh one would cost a page fault every 4 KiB."""

    def __init__(self, size: int) -> None:
        self.record: Bytes = np.empty(size, np.uint8)

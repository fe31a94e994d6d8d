"""A tier in one mapped file of slots: memory behind CXL as a DAX device or tmpfs offers it.

A slot's header is cleared before its body is written and comes last, so a killed process leaves a slot
that is empty or whole.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sgl_importance.json_text import BadJson, read_json
from sgl_importance.storage.page_record import HEADER_BYTES
from sgl_importance.storage.private_files import FILE_MODE, make_folder
from sgl_importance.storage.tier_chain.kinds.tier import StorageTier
from sgl_importance.storage.tier_chain.kinds.tier_record import (
    LINK_BYTES,
    Bytes,
    Listed,
    PageName,
    list_record,
)

_PREAMBLE_BYTES = 4096
_SLOT_ALIGNMENT = 64


class MappedTier(StorageTier):
    """``slots`` records of ``size`` bytes in a file, which is made anew where it has others.

    Raises:
        OSError: the file cannot be made, or has no room.
    """

    def __init__(self, path: Path, size: int, slots: int) -> None:
        self._size = size
        self._stride = -(-size // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        make_folder(path.parent)
        shape = json.dumps({"record_bytes": size, "slots": slots}).encode()
        total = _PREAMBLE_BYTES + slots * self._stride
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        try:
            if not _has_shape(file, shape, total):
                os.ftruncate(file, 0)
                # Taken now: a mapping of more than there is would end the process at its first use.
                try:
                    os.posix_fallocate(file, 0, total)
                except OSError:
                    os.ftruncate(file, 0)  # gives back what there was
                    raise
                os.pwrite(file, shape, 0)
            self._map = mmap.mmap(file, total)
        finally:
            os.close(file)
        self._slots: Bytes = np.frombuffer(self._map, np.uint8, offset=_PREAMBLE_BYTES).reshape(
            slots, self._stride
        )
        self._slot_of: dict[PageName, int] = {}
        self._free: list[int] = []
        self._lock = threading.Lock()  # else a slot could get another record while it is read
        for slot, data in enumerate(self._slots):
            listed = self._list(data)
            if listed is None or listed.name in self._slot_of:
                data[:HEADER_BYTES] = 0
                self._free.append(slot)
            else:
                self._slot_of[listed.name] = slot

    def put(self, name: PageName, record: Bytes) -> None:
        with self._lock:
            slot = self._slot_of.get(name)
            if slot is None:
                if not self._free:
                    raise OSError(errno.ENOSPC, "all slots are taken")
                slot = self._free.pop()
            target = self._slots[slot]
            target[:HEADER_BYTES] = 0
            target[HEADER_BYTES : self._size] = record[HEADER_BYTES:]
            target[:HEADER_BYTES] = record[:HEADER_BYTES]
            self._slot_of[name] = slot

    def get(self, name: PageName, record: Bytes) -> None:
        with self._lock:
            if name not in self._slot_of:
                raise FileNotFoundError
            record[:] = self._slots[self._slot_of[name], : self._size]

    def delete(self, name: PageName) -> None:
        with self._lock:
            slot = self._slot_of.pop(name, None)
            if slot is not None:
                self._slots[slot, :HEADER_BYTES] = 0
                self._free.append(slot)

    def contains(self, name: PageName) -> bool:
        return name in self._slot_of

    def records(self) -> Iterator[Listed]:
        for slot in list(self._slot_of.values()):
            listed = self._list(self._slots[slot])
            if listed is not None:
                yield listed

    def _list(self, slot: Bytes) -> Listed | None:
        link = slot[self._size - LINK_BYTES : self._size]
        return list_record(slot[:HEADER_BYTES].tobytes(), link.tobytes()) if slot[0] else None

    def close(self) -> None:
        self._map.flush()


def read_slots(path: Path) -> Iterator[tuple[Listed | None, Bytes]]:
    """The slots of a file that a server may be using, read only: what each lists, and its record.

    Empty slots are left out; None for one whose header is not intact. A file that is not there, or empty, has
    none: a server that could not make it leaves it so.

    Raises:
        OSError: it cannot be read, or is no file of slots.
    """
    try:
        if path.stat().st_size == 0:
            return
    except FileNotFoundError:
        return
    data = np.memmap(path, np.uint8, mode="r")
    try:
        shape = read_json(data[:_PREAMBLE_BYTES].tobytes().rstrip(b"\0"))
        size, slots = int(shape["record_bytes"]), int(shape["slots"])
        if size < HEADER_BYTES + LINK_BYTES or slots < 1:
            raise ValueError
    except (BadJson, KeyError, TypeError, ValueError, OverflowError):
        raise OSError(f"{path} is no file of slots") from None
    stride = -(-size // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
    if data.nbytes != _PREAMBLE_BYTES + slots * stride:
        raise OSError(f"{path} is no file of slots")
    for slot in data[_PREAMBLE_BYTES:].reshape(slots, stride):
        record = np.array(slot[:size])
        # A server that gives the slot to another record meanwhile changes the header first and last.
        while (record[:HEADER_BYTES] != slot[:HEADER_BYTES]).any():
            record = np.array(slot[:size])
        if record[:HEADER_BYTES].any():
            link = record[size - LINK_BYTES :].tobytes()
            yield list_record(record[:HEADER_BYTES].tobytes(), link), record


def _has_shape(file: int, shape: bytes, total: int) -> bool:
    if os.fstat(file).st_size != total:
        return False
    try:
        return bool(read_json(os.pread(file, _PREAMBLE_BYTES, 0).rstrip(b"\0")) == json.loads(shape))
    except BadJson:
        return False

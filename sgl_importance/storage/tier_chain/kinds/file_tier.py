"""A tier of files, one for each record, laid out as a directory of the verified store.

So ``sgl-importance store`` reads it. Where the file system takes it, files are read and written past the page
cache (O_DIRECT): what a tier of flash holds should not fill the memory of the tiers above it a second time.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from sgl_importance.storage.budget import PAGE_SUFFIX, UNFINISHED_SUFFIX, scan
from sgl_importance.storage.page_record import HEADER_BYTES, MissReason
from sgl_importance.storage.private_files import FILE_MODE, make_folder, publishing
from sgl_importance.storage.regular import NotRegular, open_regular
from sgl_importance.storage.store import describe_identity, set_aside
from sgl_importance.storage.tier_chain.kinds.tier import StorageTier
from sgl_importance.storage.tier_chain.kinds.tier_record import (
    LINK_BYTES,
    Bytes,
    Listed,
    PageName,
    list_record,
)

BLOCK = 4096
"""What O_DIRECT wants addresses and lengths to be multiples of, on every disk we know."""


class _Aligned(threading.local):
    """A buffer for each thread, on pages of the operating system."""

    def __init__(self, size: int) -> None:
        self.data = mmap.mmap(-1, -(-size // BLOCK) * BLOCK)


class FileTier(StorageTier):
    """Files below ``folder/pages``.

    Args:
        folder: made where it is missing.
        size: of a record.
        direct: whether to go past the page cache where the file system takes it.

    Raises:
        OSError: the folder cannot be made or written.
    """

    def __init__(self, folder: Path, size: int, *, direct: bool) -> None:
        self._folder = folder
        self._size = size
        self._root = str(folder / "pages")
        make_folder(Path(self._root))
        self.is_direct = direct and _takes_direct(folder)
        if direct:
            self.note = "O_DIRECT" if self.is_direct else "through the page cache: no O_DIRECT here"
        self._aligned = _Aligned(size)

    def put(self, name: PageName, record: Bytes) -> None:
        path = self._path(name)
        unfinished = f"{os.path.dirname(path)}/{uuid.uuid4().hex}{UNFINISHED_SUFFIX}"
        try:
            file = self._create(unfinished)
        except FileNotFoundError:
            make_folder(Path(path).parent)
            file = self._create(unfinished)
        with publishing(unfinished, path):
            try:
                self._write(file, record)
            finally:
                os.close(file)

    def _create(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(path, flags | (os.O_DIRECT if self.is_direct else 0), FILE_MODE)

    def _write(self, file: int, record: Bytes) -> None:
        data = record.data
        if self.is_direct:
            self._aligned.data[: record.nbytes] = record.tobytes()
            data = memoryview(self._aligned.data)
        written = 0
        while written < len(data):
            # The kernel stops short where space ends; the next call says why.
            written += os.write(file, data[written:])
        if written > record.nbytes:
            os.ftruncate(file, record.nbytes)

    def get(self, name: PageName, record: Bytes) -> None:
        try:
            file = open_regular(self._path(name))
        except NotRegular:  # somebody put it there; the medium is sound
            record[:HEADER_BYTES] = 0
            return
        try:
            if self.is_direct:
                fcntl.fcntl(file, fcntl.F_SETFL, os.O_DIRECT)  # and no O_NONBLOCK any more
                data = self._aligned.data
                count = os.preadv(file, [data], 0)
                record[:] = memoryview(data)[: record.nbytes]
            else:
                count = os.preadv(file, [record.data, bytearray(1)], 0)
        finally:
            os.close(file)
        if count != record.nbytes:
            record[:HEADER_BYTES] = 0  # no record of this size: its check says so

    def delete(self, name: PageName) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path(name))

    def contains(self, name: PageName) -> bool:
        return os.path.exists(self._path(name))

    def records(self) -> Iterator[Listed]:
        for file in scan(Path(self._root)):
            listed = None
            if file.is_page and file.size == self._size:
                try:
                    listed = _list(file.path, file.size)
                except NotRegular:
                    pass
                except OSError:
                    continue  # what cannot be read now may be intact
            if listed is not None and file.path == Path(self._path(listed.name)):
                yield listed
            else:
                file.path.unlink(missing_ok=True)

    def set_aside(self, name: PageName, reason: MissReason) -> bool:
        return set_aside(Path(self._path(name)), self._folder / "quarantine", reason)

    def describe(self, identity: bytes, facts: str) -> None:
        describe_identity(Path(self._root) / identity.hex(), facts)

    def _path(self, name: PageName) -> str:
        return f"{self._root}/{name.identity.hex()}/{name.page.hex()}{PAGE_SUFFIX}"


def _list(path: Path, size: int) -> Listed | None:
    file = open_regular(path)
    try:
        return list_record(os.pread(file, HEADER_BYTES, 0), os.pread(file, LINK_BYTES, size - LINK_BYTES))
    finally:
        os.close(file)


def _takes_direct(folder: Path) -> bool:
    """Whether the file system reads and writes past the page cache."""
    probe = folder / f"{uuid.uuid4().hex}{UNFINISHED_SUFFIX}"
    buffer = mmap.mmap(-1, BLOCK)
    try:
        file = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            return os.write(file, buffer) == BLOCK and os.preadv(file, [buffer], 0) == BLOCK
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    finally:
        probe.unlink(missing_ok=True)
        buffer.close()

"""A directory of pages: one file per page, published by rename, checked on every read.

``DIR/pages/<identity>/<page>.page`` holds the pages and ``DIR/quarantine`` what failed a check. There are no
folders in between: file systems index a folder, and files in many of them take ext4 several times as long.
Several servers may use one directory.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sgl_importance.storage.budget import IDENTITY_FILE, PAGE_SUFFIX, UNFINISHED_SUFFIX, Budget, use_time
from sgl_importance.storage.page_record import (
    HEADER_BYTES,
    MissReason,
    PageDamaged,
    PageMiss,
    check_page,
    encode_header,
    page_digest,
)
from sgl_importance.storage.pages import UNREADABLE, PageByPage
from sgl_importance.storage.private_files import FILE_MODE, make_folder, publishing, try_writing
from sgl_importance.storage.regular import NotRegular, open_regular
from sgl_importance.storage.store_counters import StoreCounters

QUARANTINED_FILES = 64


class PageStore(PageByPage):
    """Pages of any number of models, by model identity and key.

    Args:
        directory: made where it is missing.
        budget_bytes: most bytes that pages may take.
        ranks: of this server, which write there.
        counters: counts evictions and quarantined pages.

    Raises:
        OSError: the directory cannot be made or written.
    """

    def __init__(
        self, directory: Path, *, budget_bytes: int, ranks: int = 1, counters: StoreCounters
    ) -> None:
        self.directory = directory
        self.pages = directory / "pages"
        self._root = str(self.pages)
        self.quarantine = directory / "quarantine"
        self._facts: dict[str, str] = {}
        self._budget = Budget(self.pages, budget_bytes, ranks=ranks)
        self.counters = counters
        check_writable(directory)

    def describe(self, identity: bytes, facts: str) -> None:
        """Keeps beside an identity's pages what it stands for, as JSON, for people."""
        folder = self._folder(identity)
        self._facts[str(folder)] = facts
        describe_identity(folder, facts)

    def clear(self) -> None:
        """Deletes the pages of all servers and models on the directory."""
        self._budget.clear()

    def exists(self, identity: bytes, key: str) -> bool:
        return os.path.exists(self._path(identity, page_digest(key)))

    def read(self, identity: bytes, key: str, body: NDArray[np.uint8]) -> None:
        page = page_digest(key)
        path = self._path(identity, page)
        try:
            self._read(path, identity, page, body)
        except FileNotFoundError as error:
            raise PageMiss(MissReason.ABSENT) from error
        except OSError as error:
            if error.errno in UNREADABLE:
                self._set_aside(Path(path), MissReason.IO)  # where it is, nothing would ever replace it
            raise PageMiss(MissReason.IO) from error
        except PageDamaged as damaged:
            self._set_aside(Path(path), damaged.reason)
            raise

    def _read(self, path: str, identity: bytes, page: bytes, body: NDArray[np.uint8]) -> None:
        header, behind = bytearray(HEADER_BYTES), bytearray(1)
        try:
            file = open_regular(path)
        except NotRegular:
            raise PageDamaged(MissReason.IO) from None
        try:
            count = os.preadv(file, [header, body.data, behind], 0)
            while count and count < HEADER_BYTES + body.nbytes:
                start = count - HEADER_BYTES
                more = os.pread(file, body.nbytes - start, count) if start >= 0 else b""
                if not more:
                    break
                body[start : start + len(more)] = np.frombuffer(more, np.uint8)
                count += len(more)
        finally:
            os.close(file)
        if count < HEADER_BYTES + body.nbytes:
            raise PageDamaged(MissReason.TRUNCATED)
        if count > HEADER_BYTES + body.nbytes:
            raise PageDamaged(MissReason.LENGTH)
        check_page(bytes(header), body, page=page, identity=identity)

    def write(self, identity: bytes, key: str, body: NDArray[np.uint8], *, depth: int, moment: int) -> bool:
        """As ``PageByPage.write``.

        Raises:
            OSError: it could not be written; nothing of it is left.
        """
        page = page_digest(key)
        path = self._path(identity, page)
        if os.path.exists(path):
            _touch(path, use_time(moment, depth))
            return False
        size = HEADER_BYTES + body.nbytes
        deleted = self._budget.admit(size)
        if deleted is None:
            raise OSError(errno.EFBIG, f"a page of {size} bytes exceeds the budget")
        if deleted:
            self.counters.add("evicted_pages", amount=deleted)
        try:
            header = encode_header(page=page, identity=identity, depth=depth, body=body)
            self._publish(path, header, body, use_time(moment, depth))
        except BaseException:
            self._budget.release(size)
            raise
        self._budget.written(size)
        return True

    def _publish(self, path: str, header: bytes, body: NDArray[np.uint8], mtime_ns: int) -> None:
        folder = os.path.dirname(path)
        unfinished = f"{folder}/{uuid.uuid4().hex}{UNFINISHED_SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            file = os.open(unfinished, flags, FILE_MODE)
        except FileNotFoundError:
            if not self.pages.exists():
                self.counters.add("lost_directories")
            make_folder(Path(folder))
            file = os.open(unfinished, flags, FILE_MODE)
            if folder in self._facts:
                describe_identity(Path(folder), self._facts[folder])
        with publishing(unfinished, path):
            try:
                written = os.writev(file, [header, body.data])
                while written < len(header) + body.nbytes:
                    # The kernel stops short where space ends; the next call says why.
                    rest = (header + body.tobytes())[written:]
                    written += os.write(file, rest)
                os.utime(file, ns=(mtime_ns, mtime_ns))
            finally:
                os.close(file)

    def touch(self, identity: bytes, keys: list[str], moment: int) -> None:
        for depth, key in enumerate(keys):
            _touch(self._path(identity, page_digest(key)), use_time(moment, depth))

    def _path(self, identity: bytes, page: bytes) -> str:
        # A string: making a Path of several parts takes as long as reading a small page.
        return f"{self._root}/{identity.hex()}/{page.hex()}{PAGE_SUFFIX}"

    def _folder(self, identity: bytes) -> Path:
        return self.pages / identity.hex()

    def _set_aside(self, path: Path, reason: MissReason) -> None:
        if set_aside(path, self.quarantine, reason):
            self.counters.add("quarantined_pages")


def _touch(path: str, mtime_ns: int) -> None:
    with suppress(OSError):
        os.utime(path, ns=(mtime_ns, mtime_ns))


def describe_identity(folder: Path, facts: str) -> None:
    """Says in the folder of an identity's pages what it stands for; disk trouble is no trouble here."""
    with suppress(OSError):
        make_folder(folder)
        unfinished = folder / f"{uuid.uuid4().hex}{UNFINISHED_SUFFIX}"
        with publishing(unfinished, folder / IDENTITY_FILE):
            unfinished.write_text(facts + "\n")


def set_aside(path: Path, quarantine: Path, reason: MissReason) -> bool:
    """Moves a page into a folder of at most ``QUARANTINED_FILES``; deletes it where that fails."""
    try:
        make_folder(quarantine)
        os.replace(path, quarantine / f"{reason.value}-{path.parent.name[:8]}-{path.name}")
    except OSError:
        with suppress(OSError):
            path.unlink()
        return False
    _bound(quarantine)
    return True


def copy_aside(record: NDArray[np.uint8], name: str, quarantine: Path, reason: MissReason) -> None:
    """As ``set_aside`` for a damaged record that is no file of ours; disk trouble is no trouble here."""
    with suppress(OSError):
        make_folder(quarantine)
        (quarantine / f"{reason.value}-{name}").write_bytes(record.tobytes())
    _bound(quarantine)


def _bound(quarantine: Path) -> None:
    """Deletes the oldest files; a folder that lay in the place of a page stays."""
    dated = []
    with suppress(OSError):
        for file in quarantine.iterdir():
            with suppress(OSError):  # another server deleted it
                status = file.lstat()  # of a link itself, which may lead nowhere
                if not stat.S_ISDIR(status.st_mode):
                    dated.append((status.st_mtime_ns, file))
    for _, file in sorted(dated)[:-QUARANTINED_FILES]:
        with suppress(OSError):
            file.unlink()


def check_writable(directory: Path) -> None:
    """Makes the directory of a store and tries whether files can be written into it.

    Raises:
        OSError: it cannot be made, or nothing can be written into it.
    """
    make_folder(directory / "pages")
    try_writing(directory)

"""The processes that use a directory, and those of them that ended without leaving it."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

from sgl_importance.storage.private_files import make_folder
from sgl_importance.storage.store_counters import StoreCounters

MARK_SUFFIX = ".process"
LOOK_SECONDS = 1.0
LOST_MARK_SECONDS = 600.0
_FLOCK = "hhqqi4x"
"""C's ``struct flock`` on 64-bit Linux: type, whence, start, length, process."""


class Presence:
    """This process among all that use a directory.

    Each keeps a locked file below ``DIR/processes``. The kernel drops the lock of a process that ends in
    whatever way, and only one that leaves deletes its file: an unlocked file tells of a process that was
    killed, or whose machine was. POSIX locks, which network file systems know and a forked child does not
    inherit. Their owner is a process: one process has one ``Presence`` in a directory.

    Args:
        directory: of the store.
        counters: counts what ``look`` finds.
    """

    def __init__(self, directory: Path, counters: StoreCounters) -> None:
        self._folder = directory / "processes"
        self._mark = self._folder / f"{uuid.uuid4().hex}{MARK_SUFFIX}"
        self._counters = counters
        self._file: int | None = None
        self._has_left = False
        self._lock = threading.Lock()
        """Of the two above; never held while a disk is asked, which may hang."""
        self._alive: set[str] = set()
        self._lost: set[str] = set()
        self._next_look = 0.0

    def is_due(self) -> bool:
        """Whether the last look is a while ago; whoever learns so looks, and the next look is due later."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_SECONDS
        return True

    def look(self) -> None:
        """Counts the processes that came or were lost since the last look. Never raises for a disk."""
        with suppress(OSError):
            self._enter()
            for name in os.listdir(self._folder):
                if name.endswith(MARK_SUFFIX) and name != self._mark.name and name not in self._lost:
                    with suppress(OSError):  # it left, or is none of ours to open
                        self._look_at(name)

    def leave(self) -> None:
        """Takes the mark away: this process is not lost. A look that is still under way takes its own."""
        with self._lock:
            self._has_left = True
        self._drop_mark()

    def _drop_mark(self) -> None:
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                self._mark.unlink()
            os.close(file)

    def _enter(self) -> None:
        if self._file is not None and self._mark.exists():
            return
        self._drop_mark()  # the directory was removed
        make_folder(self._folder)
        # Locked before it has its name: a file without a lock is a lost process.
        unnamed = self._mark.with_suffix(".tmp")
        unnamed.touch()
        # Open for reading, under a shared lock: a file open for writing would keep its disk from being
        # mounted read-only.
        file = os.open(unnamed, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.rename(unnamed, self._mark)
        except OSError:
            os.close(file)
            raise
        with self._lock:
            self._file, has_left = file, self._has_left
        if has_left:
            self._drop_mark()

    def _look_at(self, name: str) -> None:
        path = self._folder / name
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if not _is_locked(file):
                self._lost.add(name)
                self._note_lost(file, path)
            elif name not in self._alive:
                self._alive.add(name)
                self._counters.add("neighbours")
        finally:
            os.close(file)

    def _note_lost(self, file: int, path: Path) -> None:
        """Counts a lost process by its mark, which is kept a while, so that every process learns of it."""
        status = os.fstat(file)
        was_known = status.st_size > 0
        if was_known and time.time() - status.st_mtime > LOST_MARK_SECONDS:
            path.unlink(missing_ok=True)
            return
        self._counters.add("lost_neighbours")
        if not was_known:
            os.ftruncate(file, 1)  # which dates it, too: until now it had the date of the process's start


def _is_locked(file: int) -> bool:
    """Whether another process holds a shared lock on the file. Only asks: who took one to find out would be
    taken for alive by others that look at the same moment."""
    wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, *_ = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, wanted))
    return bool(kind == fcntl.F_RDLCK)

"""The byte budget of a directory of pages, kept by deleting whole ends of sequences first."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE_SUFFIX = ".page"
UNFINISHED_SUFFIX = ".tmp"
UNFINISHED_SECONDS = 60.0
AHEAD_SECONDS = 3600.0
"""By which clocks of machines on one directory may differ; a wrong clock set a date that is further ahead."""
NANOSECONDS_PER_PAGE = 1000
LOW_WATERMARK = 0.9
RESCAN_SHARE = 1 / 16


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file below a store's ``pages``."""

    path: Path
    size: int
    mtime_ns: int

    @property
    def is_page(self) -> bool:
        return self.path.suffix == PAGE_SUFFIX

    def is_ahead(self, now_ns: int) -> bool:
        """Whether it was used when the wall clock was ahead of ``now_ns``: before all that was used since."""
        return self.mtime_ns > now_ns + int(AHEAD_SECONDS * 1e9)


def use_time(moment: int, depth: int) -> int:
    """The modification time, in ns, of a page with ``depth`` pages in front that is used at ``moment``.

    A page's recency is its file's modification time, which several servers share without an index. A use
    dates a page a little before its predecessor, and the pages in front of it too: the oldest file is always
    the end of a sequence, and a storage hit stops at the first missing page.
    """
    return moment - depth * NANOSECONDS_PER_PAGE


def scan(pages: Path) -> Iterator[StoredFile]:
    """Every file below ``pages``; those that vanish meanwhile are left out."""
    folders = [pages]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    try:
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(Path(entry.path))
                        elif entry.name.endswith((PAGE_SUFFIX, UNFINISHED_SUFFIX)):
                            status = entry.stat()
                            yield StoredFile(Path(entry.path), status.st_size, status.st_mtime_ns)
                    except OSError:
                        continue
        except OSError:
            continue


def delete_abandoned(files: list[StoredFile]) -> list[StoredFile]:
    """Deletes what a killed writer left behind; returns the files that stay."""
    now = time.time_ns()
    oldest = now - int(UNFINISHED_SECONDS * 1e9)
    kept = []
    for file in files:
        if file.is_page or (file.mtime_ns > oldest and not file.is_ahead(now)):
            kept.append(file)
        else:
            file.path.unlink(missing_ok=True)
    return kept


def evict(pages: Path, limit: int) -> tuple[int, int]:
    """Deletes the least recently used pages until at most ``limit`` bytes are left.

    Returns:
        The bytes that are left, and the number of pages deleted.
    """
    files = delete_abandoned(list(scan(pages)))
    left, deleted = sum(file.size for file in files), 0
    now = time.time_ns()
    for file in sorted(files, key=lambda file: (not file.is_ahead(now), file.mtime_ns)):
        if left <= limit:
            break
        if file.is_page:
            file.path.unlink(missing_ok=True)
            left -= file.size
            deleted += 1
    return left, deleted


class Budget:
    """Admits writes and evicts for them.

    One server never exceeds ``limit`` bytes; each further server on the directory may add a sixteenth of it,
    because it sees the writes of the others only when it scans again.
    """

    def __init__(self, pages: Path, limit: int) -> None:
        self.limit = limit
        self._pages = pages
        self._lock = threading.Lock()
        self._used: int | None = None
        self._admitted_since_scan = 0

    def admit(self, size: int) -> int | None:
        """Reserves ``size`` bytes; the number of pages deleted for them, None where they can never fit."""
        if size > self.limit:
            return None
        with self._lock:
            deleted = 0
            full = self._used is None or self._used + size > self.limit
            if full or self._admitted_since_scan > self.limit * RESCAN_SHARE:
                used, deleted = evict(self._pages, self.limit)
                if used + size > self.limit:
                    used, more = evict(self._pages, min(int(self.limit * LOW_WATERMARK), self.limit - size))
                    deleted += more
                self._used, self._admitted_since_scan = used, 0
            assert self._used is not None
            self._used += size
            self._admitted_since_scan += size
            return deleted

    def release(self, size: int) -> None:
        """Gives back what ``admit`` reserved for a file that is not there."""
        with self._lock:
            if self._used is not None:
                self._used -= size

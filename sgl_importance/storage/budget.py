"""The byte budget of a directory of pages, kept by deleting whole ends of sequences first."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, islice, takewhile
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

PAGE_SUFFIX = ".page"
UNFINISHED_SUFFIX = ".tmp"
IDENTITY_FILE = "identity.json"
"""Says in the folder of a model's pages, for people, which model that is."""
UNFINISHED_SECONDS = 60.0
AHEAD_SECONDS = 3600.0
"""By which clocks of machines on one directory may differ; a wrong clock set a date that is further ahead."""
NANOSECONDS_PER_PAGE = 1000
LOW_WATERMARK = 0.9
RESCAN_SHARE = 1 / 16
LOOK_AT_EVERY = 64
RETRY_SECONDS = 30.0
"""After which a store that stayed too full looks again whether something can be deleted."""

OnFailure = Callable[[Path, OSError], None]
"""Hears which file could not be deleted, and why."""


class StoredFile(NamedTuple):
    """A file below a store's ``pages``: a plain tuple, since there may be millions."""

    mtime_ns: int
    size: int
    folder: str
    name: str

    @property
    def path(self) -> Path:
        return Path(self.folder, self.name)

    @property
    def is_page(self) -> bool:
        return self.name.endswith(PAGE_SUFFIX)

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
    folders = [str(pages)]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    try:
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                        elif (name := entry.name).endswith((PAGE_SUFFIX, UNFINISHED_SUFFIX)):
                            status = entry.stat()
                            yield StoredFile(status.st_mtime_ns, status.st_size, folder, name)
                    except OSError:
                        continue
        except OSError:
            continue


def most_bytes(pages: Path) -> int:
    """Bytes below ``pages``, or a little more, by counting: a look at each of a million files takes seconds.

    Pages of one model have one size. Of each folder the first are looked at, and every 64th, since some may
    be torn; the largest stands for all.
    """
    total, folders = 0, [str(pages)]
    while folders:
        count = largest = 0
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.name.endswith(PAGE_SUFFIX):
                    count += 1
                    if count <= LOOK_AT_EVERY or count % LOOK_AT_EVERY == 0:
                        largest = max(largest, _size_of(entry))
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.name.endswith(UNFINISHED_SUFFIX):
                    total += _size_of(entry)
        total += count * largest
    return total


def _size_of(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except OSError:
        return 0  # it has vanished


def ignore(path: Path, error: OSError) -> None:
    """An ``OnFailure`` for whom it is enough that the file stays."""


def delete(path: Path, on_failure: OnFailure) -> bool:
    """Whether the file is gone: one of another user, or on a disk that became read-only, stays."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        on_failure(path, error)
        return False
    return True


def delete_abandoned(files: list[StoredFile], on_failure: OnFailure = ignore) -> list[StoredFile]:
    """Deletes what a killed writer left behind; returns the files that stay."""
    now = time.time_ns()
    oldest = now - int(UNFINISHED_SECONDS * 1e9)
    kept = []
    for file in files:
        is_in_use = file.is_page or (file.mtime_ns > oldest and not file.is_ahead(now))
        if is_in_use or not delete(file.path, on_failure):
            kept.append(file)
    return kept


def evict(
    pages: Path, limit: int, *, target: int | None = None, on_failure: OnFailure = ignore
) -> tuple[int, int]:
    """Where there are more than ``limit`` bytes, deletes the least recently used pages.

    What cannot be deleted is passed over.

    Args:
        pages: folder of a store's pages.
        limit: bytes.
        target: bytes that are to be left then, at most; ``limit`` where None.
        on_failure: called for each file that cannot be deleted.

    Returns:
        The bytes that are left, and the number of pages deleted.
    """
    files = delete_abandoned(list(scan(pages)), on_failure)
    left, deleted = sum(file.size for file in files), 0
    if left <= limit:
        return left, 0
    target = limit if target is None else target
    now = time.time_ns()
    files.sort(key=attrgetter("mtime_ns"))
    ahead = list(takewhile(lambda file: file.is_ahead(now), reversed(files)))
    for file in chain(reversed(ahead), files[: len(files) - len(ahead)]):
        if left <= target:
            break
        if file.is_page and delete(file.path, on_failure):
            left -= file.size
            deleted += 1
    remove_bare_folders(pages)
    return left, deleted


def remove_bare_folders(pages: Path) -> None:
    """Removes the folders of models that have no page any more; who stores one again makes it again."""
    with suppress(OSError):
        for folder in pages.iterdir():
            with suppress(OSError):  # it is not ours, or a page has just come
                with os.scandir(folder) as entries:
                    first = [entry.name for entry in islice(entries, 2)]
                if first == [IDENTITY_FILE]:
                    (folder / IDENTITY_FILE).unlink()
                    folder.rmdir()


class Budget:
    """Admits writes and evicts for them.

    The ranks of one server together never exceed ``limit`` bytes, although each sees what the others wrote
    only when it looks: it looks again after a small share of the limit, and leaves room for as much of each
    of the others. Another server on the directory may add the shares of its ranks, a sixteenth in all.

    Args:
        pages: folder of the store's pages.
        limit: bytes.
        ranks: of this server, which write there.
    """

    def __init__(self, pages: Path, limit: int, *, ranks: int = 1) -> None:
        self.limit = limit
        self._ranks = ranks
        self._pages = pages
        self._lock = threading.Lock()
        self._used: int | None = None
        self._admitted_since_look = 0
        self._in_flight = 0
        """Bytes that were admitted and may not be there yet, where a look misses them."""
        self._deleted = 0
        self._failure: OSError | None = None
        self._retry_at = float("-inf")
        self._has_warned = False

    def admit(self, size: int) -> int | None:
        """Reserves ``size`` bytes, until ``written`` or ``release``; None where they can never fit.

        Returns:
            The number of pages deleted since the last bytes that were admitted.

        Raises:
            OSError: too much of what is there cannot be deleted; nothing is tried for ``RETRY_SECONDS``.
        """
        share = max(int(self.limit * RESCAN_SHARE) // self._ranks, size)
        room = self.limit - (self._ranks - 1) * share - size
        if room < 0:
            return None
        with self._lock:
            full = self._used is None or self._used > room
            if full and time.monotonic() < self._retry_at:
                raise self._refusal()
            if full or self._admitted_since_look + size > share:
                self._used = self._look(room)
                if self._used > room:
                    self._retry_at = time.monotonic() + RETRY_SECONDS
                    raise self._refusal()
            assert self._used is not None
            self._used += size
            self._in_flight += size
            self._admitted_since_look += size
            deleted, self._deleted = self._deleted, 0
            return deleted

    def clear(self) -> None:
        """Deletes every page, whoever wrote it; what cannot be deleted stays, and counts."""
        with self._lock:
            self._used = self._evict(0, 0)

    def _look(self, room: int) -> int:
        """The bytes that are there; evicts where they are more than ``room``."""
        used = most_bytes(self._pages) + self._in_flight
        self._admitted_since_look = self._in_flight
        return used if used <= room else self._evict(room, min(int(self.limit * LOW_WATERMARK), room))

    def _evict(self, room: int, target: int) -> int:
        self._failure = None
        coming = self._in_flight
        left, deleted = evict(
            self._pages, room - coming, target=target - coming, on_failure=self._cannot_delete
        )
        self._deleted += deleted
        return left + coming

    def _cannot_delete(self, path: Path, error: OSError) -> None:
        self._failure = self._failure or error
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s cannot be deleted (%s): it stays, and so does whatever else cannot; all of it counts "
                "towards the budget of the store",
                path,
                error.strerror,
            )

    def _refusal(self) -> OSError:
        if self._failure is None:
            return OSError(errno.EFBIG, "the budget is taken by files that are being written")
        return OSError(self._failure.errno, "the store is full, and what is in it cannot be deleted")

    def written(self, size: int) -> None:
        """What ``admit`` reserved is there."""
        with self._lock:
            self._in_flight -= size

    def release(self, size: int) -> None:
        """Gives back what ``admit`` reserved for a file that is not there."""
        with self._lock:
            self._in_flight -= size
            if self._used is not None:
                self._used -= size

"""Segment files of a recording: numbered, closed at a size, the oldest deleted when the budget is spent."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import BinaryIO

from sgl_importance.observe.trace.framing import MAGIC
from sgl_importance.storage.private_files import FILE_MODE, make_folder

FEWEST_SEGMENTS_PER_BUDGET = 8  # one is deleted when the budget is spent: at most an eighth of the recording
MOST_SEGMENT_BYTES = 32 << 20
"""A writer keeps the digests of all pages of its segment in memory."""
_PREFIX, _SUFFIX = "segment-", ".sgltrace"


def segment_files(directory: Path) -> list[Path]:
    """Segment files of a recording, oldest first; files of other names, as copies have, are none."""
    found = (file for file in directory.glob(f"{_PREFIX}*{_SUFFIX}") if _number(file).isdecimal())
    return sorted(found, key=segment_number)


def segment_number(file: Path) -> int:
    """The number in a segment file's name."""
    return int(_number(file))


def _number(file: Path) -> str:
    return file.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)


def segment_bytes(file: Path) -> int:
    """Bytes of a segment file; 0 where a server that still records has deleted it."""
    with contextlib.suppress(FileNotFoundError):
        return file.stat().st_size
    return 0


def _may_be_deleted(file: Path) -> bool:
    """Whether no writer holds its lock."""
    try:
        opened = file.open("rb")
    except OSError:
        return False  # it is gone, or another user's
    with opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True  # no locks here
    return True


class SegmentStore:
    """Writes frames to the youngest segment file of a directory, and keeps the directory within a budget.

    Args:
        directory: made where it is missing; segments that it holds already count, and are deleted first.
        max_bytes: budget of all segment files together.

    Raises:
        OSError: the directory cannot be made or written.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        assert max_bytes > 0
        make_folder(directory)
        self._directory = directory
        self._max_bytes = max_bytes
        self._file: BinaryIO | None = None
        self._written = 0
        self.number = -1

    @property
    def is_full(self) -> bool:
        """Whether the next record belongs into a new segment."""
        most = min(self._max_bytes // FEWEST_SEGMENTS_PER_BUDGET, MOST_SEGMENT_BYTES)
        return self._file is None or self._written >= most

    def open_next(self) -> int:
        """Closes the open segment and starts the next one; its number."""
        self.close()
        while self._file is None:
            existing = segment_files(self._directory)
            self.number = segment_number(existing[-1]) + 1 if existing else 0
            # Never over a file of another writer, which may take the number meanwhile.
            with contextlib.suppress(FileExistsError):
                path = self._directory / f"{_PREFIX}{self.number:06d}{_SUFFIX}"
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._file = os.fdopen(os.open(path, flags, FILE_MODE), "wb")
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.append(MAGIC)
        return self.number

    def append(self, frames: bytes) -> None:
        """Adds whole frames to the open segment."""
        assert self._file is not None
        self._file.write(frames)
        self._written += len(frames)

    def flush(self) -> None:
        """Hands the written frames to the operating system: from here on they survive the process."""
        if self._file is not None:
            self._file.flush()

    def enforce_budget(self) -> None:
        """Deletes the oldest segments until the rest fits the budget, never one that is being written.

        Another writer of the directory may delete meanwhile, too.
        """
        sizes = {file: segment_bytes(file) for file in segment_files(self._directory)}
        total = sum(sizes.values())
        for file in list(sizes)[:-1]:
            if total <= self._max_bytes:
                break
            if _may_be_deleted(file):
                file.unlink(missing_ok=True)
                total -= sizes[file]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
        self._written = 0

"""Whether a file that is open is still the one at its path: not removed, moved away or replaced."""

from __future__ import annotations

import os
from pathlib import Path


class FilePlace:
    """The place of a file that has just been opened.

    Args:
        path: of the file. While it is open its inode is in use, so no other file can be taken for it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened = _identity(path)

    def is_held(self) -> bool:
        """Whether opening the path now gives that file; waits for the disk."""
        return self._opened is not None and _identity(self._path) == self._opened


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino

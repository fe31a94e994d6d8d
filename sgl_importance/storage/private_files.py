"""What is written for nobody else to read: prompts can be inferred from stored pages."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FILE_MODE = 0o600
FOLDER_MODE = 0o700


def make_folder(folder: Path) -> None:
    """Makes a folder where it is missing, with those above it. One that is there keeps its mode.

    Raises:
        OSError: it cannot be made.
    """
    try:
        folder.mkdir(FOLDER_MODE, exist_ok=True)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_folder(folder.parent)
        folder.mkdir(FOLDER_MODE, exist_ok=True)


@contextmanager
def publishing(unfinished: str | Path, path: str | Path) -> Iterator[None]:
    """What the block writes to ``unfinished`` becomes ``path`` at its end; where it fails, nothing is left.

    Raises:
        OSError: it cannot be renamed.
    """
    try:
        yield
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)
        raise


def try_writing(folder: Path) -> None:
    """Tries whether files can be written into a folder.

    Raises:
        OSError: they cannot.
    """
    probe = folder / f"{uuid.uuid4().hex}.tmp"
    probe.touch()
    probe.unlink()

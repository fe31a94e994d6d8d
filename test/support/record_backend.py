"""A stand-in for a storage backend of HiCache: it stores and gives back by key, and does nothing else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sgl_importance.storage.page_record import MissReason, PageDamaged
from sgl_importance.storage.tier_chain.kinds.tier_record import Bytes


class FolderBackend:
    """Records as files of a folder, which outlive the process.

    Attributes:
        is_down: it says of everything that it did not work, as upstream's backends do.
        error: which it raises instead.
        most: records that it takes; None for any number.
        writes: of records that were not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.is_down = False
        self.error: Exception | None = None
        self.most: int | None = None
        self.writes = 0

    def records(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if path.suffix != ".new")

    def put(self, key: str, record: Bytes) -> bool:
        self._raise()
        if self.is_down:
            return False
        if not (self.folder / key).exists():
            if self.most is not None and len(self.records()) >= self.most:
                return False
            unfinished = self.folder / f"{key}.new"
            unfinished.write_bytes(record.tobytes())
            os.replace(unfinished, self.folder / key)
            self.writes += 1
        return True

    def get(self, key: str, record: Bytes) -> bool:
        self._raise()
        path = self.folder / key
        if self.is_down or not path.exists():
            return False
        data = np.fromfile(path, np.uint8)
        if data.nbytes != record.nbytes:
            raise PageDamaged(MissReason.LENGTH)
        record[:] = data
        return True

    def present(self, keys: Sequence[str]) -> list[bool]:
        self._raise()
        return [not self.is_down and (self.folder / key).exists() for key in keys]

    def close(self) -> None:
        self._raise()

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

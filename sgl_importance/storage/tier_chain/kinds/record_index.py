"""Which records of ours lie in a store that lists none: for each, a file of this machine says what it is."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sgl_importance.storage.page_record import HEADER_BYTES, decode_header
from sgl_importance.storage.private_files import make_folder, publishing
from sgl_importance.storage.tier_chain.kinds.tier_record import (
    LINK_BYTES,
    Bytes,
    Listed,
    PageName,
    list_record,
)

INDEX = "index"
_ID_FILE = "id"
_ID_START = "sgl-importance/"
_UNFINISHED = ".tmp"


class IndexEntry(NamedTuple):
    """What a file of the index says of its record.

    Attributes:
        data: header and link of the record.
        listed: what they say.
        size: of the record, in bytes.
    """

    data: bytes
    listed: Listed
    size: int


class RecordIndex:
    """Files below ``folder/index``; an entry appears and goes whole, also where the process is killed.

    Args:
        folder: of one rank of one server; made where it is missing.

    Attributes:
        prefix: a name that no other folder has, so that two servers never touch each other's records.

    Raises:
        OSError: the folder cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        self._root = folder / INDEX
        make_folder(self._root)
        self.prefix = _own_id(folder / _ID_FILE)

    def add(self, name: PageName, data: bytes) -> None:
        """Takes in the entry of a record, in place of an earlier one of its name."""
        path = self._path(name)
        unfinished = path.with_name(f"{uuid.uuid4().hex}{_UNFINISHED}")
        with publishing(unfinished, path):
            try:
                unfinished.write_bytes(data)
            except FileNotFoundError:
                make_folder(path.parent)
                unfinished.write_bytes(data)

    def remove(self, name: PageName) -> None:
        """The record is gone; one that has no entry has none already."""
        self._path(name).unlink(missing_ok=True)

    def find(self, name: PageName) -> IndexEntry | None:
        """The entry of a record, if it has an intact one."""
        try:
            return read_entry(self._path(name))
        except FileNotFoundError:
            return None

    def entries(self, size: int) -> Iterator[list[tuple[Path, IndexEntry | None]]]:
        """The files of each model, with their entries; None for what is no entry of a record of this size.

        What a killed process had begun is deleted.
        """
        for folder in sorted(self._root.iterdir()):
            for path in sorted(folder.glob(f"*{_UNFINISHED}")):
                path.unlink(missing_ok=True)
            found: list[tuple[Path, IndexEntry | None]] = []
            for path in sorted(folder.iterdir()):
                entry = read_entry(path)
                is_whole = entry is not None and entry.size == size and path == self._path(entry.listed.name)
                found.append((path, entry if is_whole else None))
            yield found

    def _path(self, name: PageName) -> Path:
        return self._root / name.identity.hex() / name.page.hex()


def entry_data(record: Bytes) -> bytes:
    """What the index keeps of a record."""
    return record[:HEADER_BYTES].tobytes() + record[-LINK_BYTES:].tobytes()


def read_entry(path: Path) -> IndexEntry | None:
    """What a file of an index says; None if it is no entry.

    Raises:
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    if len(data) != HEADER_BYTES + LINK_BYTES:
        return None
    header = data[:HEADER_BYTES]
    listed = list_record(header, data[HEADER_BYTES:])
    return None if listed is None else IndexEntry(data, listed, HEADER_BYTES + decode_header(header).length)


def _own_id(path: Path) -> str:
    with suppress(FileNotFoundError, UnicodeDecodeError):
        known = path.read_text(encoding="ascii")
        if known.startswith(_ID_START):  # a loss of power may leave the file empty, or full of zeros
            return known
    name = f"{_ID_START}{uuid.uuid4().hex}"
    unfinished = path.with_suffix(_UNFINISHED)
    with publishing(unfinished, path):
        unfinished.write_text(name, encoding="ascii")
    return name

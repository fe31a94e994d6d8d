"""A tier in the memory of other machines: a Mooncake store, over RDMA or TCP.

Its client deletes a record at once (``remove`` with ``force``, past the lease of whoever read it) but lists
none. So a folder of this machine keeps, for each record, its header and link: written before the record and
deleted after it, so that no kill leaves a record that nobody knows. Mooncake evicts by an order of its own
when its memory runs short, and a master that starts anew has forgotten all: what is gone is a miss.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from sgl_importance.storage.page_record import HEADER_BYTES
from sgl_importance.storage.tier_chain.kinds.record_index import RecordIndex, entry_data
from sgl_importance.storage.tier_chain.kinds.tier import StorageTier
from sgl_importance.storage.tier_chain.kinds.tier_record import Bytes, Listed, PageName

_NO_SPACE, _NOT_FOUND = -200, -704
"""Codes of Mooncake's ``ErrorCode``: no memory for the record, and no such record."""
_BUFFER_BYTES = 64 << 20
"""Of this process, through which records pass."""


class MooncakeClient(Protocol):
    """What we use of ``mooncake.store.MooncakeDistributedStore``, as of 0.3.13; codes below 0 are errors."""

    def upsert(self, key: str, value: memoryview) -> int: ...

    def get(self, key: str) -> bytes: ...

    def remove(self, key: str, force: bool) -> int: ...

    def is_exist(self, key: str) -> int: ...

    def batch_is_exist(self, keys: list[str]) -> list[int]: ...

    def close(self) -> object: ...


def connect(*, master: str, protocol: str, devices: str, host: str, record_bytes: int) -> MooncakeClient:
    """A client that lends the store no memory.

    Args:
        master: address of the store's master, ``host:port``.
        devices: RDMA devices, separated by commas; empty to let Mooncake choose.
        host: by which store nodes reach this machine; empty for its name.
        record_bytes: largest record.

    Raises:
        OSError: the package is missing, or no master answers.
    """
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise OSError(f"{error}: pip install mooncake-transfer-engine") from error
    client = MooncakeDistributedStore()
    buffer = max(_BUFFER_BYTES, 4 * record_bytes)
    name = host or socket.gethostname()
    code = client.setup(name, "P2PHANDSHAKE", 0, buffer, protocol, devices, master)
    if code:
        raise OSError(f"no master of Mooncake answers at {master} over {protocol} (code {code})")
    found: MooncakeClient = client
    return found


class MooncakeTier(StorageTier):
    """Records below a name of their own in the store.

    Args:
        folder: of this rank; made where it is missing. Without it, what the store holds is not found again.
        size: of a record.
        client: of the store, which is closed with the tier.

    Raises:
        OSError: the folder cannot be made or written.
    """

    note = "kept by Mooncake, which may evict"

    def __init__(self, folder: Path, size: int, client: MooncakeClient) -> None:
        self._size = size
        self._client = client
        self._index = RecordIndex(folder)

    def put(self, name: PageName, record: Bytes) -> None:
        self._index.add(name, entry_data(record))
        code = self._client.upsert(self._key(name), record.data)
        if code < 0:
            # An older record of this name may be left, which the entry would describe wrongly.
            with suppress(OSError):
                self.delete(name)
            full = code == _NO_SPACE
            raise OSError(errno.ENOSPC if full else errno.EIO, f"Mooncake did not store it (code {code})")

    def get(self, name: PageName, record: Bytes) -> None:
        data = self._client.get(self._key(name))
        if not data:  # It says nothing else of a record that is missing and of one that cannot be reached.
            code = self._client.is_exist(self._key(name))
            if code == 0:
                raise FileNotFoundError
            raise OSError(errno.EIO, f"Mooncake did not read it (code {code})")
        if len(data) != record.nbytes:
            record[:HEADER_BYTES] = 0  # no record of this size: its check says so
            return
        record.data[:] = data

    def delete(self, name: PageName) -> None:
        code = self._client.remove(self._key(name), True)
        if code < 0 and code != _NOT_FOUND:
            raise OSError(errno.EIO, f"Mooncake did not delete it (code {code})")
        self._index.remove(name)

    def contains(self, name: PageName) -> bool:
        return self._client.is_exist(self._key(name)) == 1

    def records(self) -> Iterator[Listed]:
        for found in self._index.entries(self._size):
            keys = [f"{self._index.prefix}/{path.parent.name}/{path.name}" for path, _ in found]
            codes = self._client.batch_is_exist(keys) if keys else []
            for (path, entry), key, code in zip(found, keys, codes, strict=True):
                if code < 0:
                    raise OSError(errno.EIO, f"Mooncake does not answer (code {code})")
                if entry is not None and code == 1:
                    yield entry.listed
                else:
                    self._client.remove(key, True)
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        self._client.close()

    def _key(self, name: PageName) -> str:
        return f"{self._index.prefix}/{name.identity.hex()}/{name.page.hex()}"

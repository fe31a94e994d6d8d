"""Frames of a segment file: length, checksum, payload. A frame that a crash cut off is left out."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

MAGIC = b"SGLTRACE"
MAX_PAYLOAD = 1 << 28
_FRAME = struct.Struct("<II")  # payload length, CRC-32 of length and payload
_LENGTH = struct.Struct("<I")


def _checksum(payload: bytes) -> int:
    # Over the length too, or a run of zeros would read as frames without payload.
    return zlib.crc32(payload, zlib.crc32(_LENGTH.pack(len(payload))))


def frame(payload: bytes) -> bytes:
    """The bytes on disk of one payload."""
    assert len(payload) <= MAX_PAYLOAD, len(payload)
    return _FRAME.pack(len(payload), _checksum(payload)) + payload


class FrameReader:
    """Payloads of one segment file, up to the first frame that is cut short or damaged.

    Nothing behind such a frame is read: a writer only appends, so it is where a crash happened.

    Args:
        file: open for reading in binary mode, at its start.

    Attributes:
        torn_bytes: bytes behind the last whole frame, known once the iteration has ended.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.torn_bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        end = self._file.seek(0, 2)
        self._file.seek(0)
        if self._file.read(len(MAGIC)) != MAGIC:
            self.torn_bytes = end
            return
        whole = len(MAGIC)
        while (payload := self._next()) is not None:
            whole = self._file.tell()
            yield payload
        self.torn_bytes = max(end - whole, 0)  # a server may have added frames meanwhile

    def _next(self) -> bytes | None:
        head = self._file.read(_FRAME.size)
        if len(head) < _FRAME.size:
            return None
        length, checksum = _FRAME.unpack(head)
        if length > MAX_PAYLOAD:
            return None
        payload = self._file.read(length)
        return payload if len(payload) == length and _checksum(payload) == checksum else None

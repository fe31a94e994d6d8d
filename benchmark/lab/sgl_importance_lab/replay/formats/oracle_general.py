"""oracleGeneral: the binary traces of libCacheSim; independent objects, so only for ``--object-level``.

Format: 1a1a11a/libCacheSim, little-endian records of uint32 time in seconds, uint64 object id, uint32 size
in bytes, int64 index of the next request for the object (-1 or the largest int64 for none), as they are or
in a zstd stream. Every object counts as one block, as under libCacheSim's ``--ignore-obj-size 1``; the next
index is not used, since every trace gets its own.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_importance_lab.replay.formats.line_reader import BadRecord, OnBadRecord, ReadOptions, TraceError
from sgl_importance_lab.replay.trace import IntArray, Trace

NAME = "oracle-general"
RECORD = np.dtype([("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_DETECTION_RECORDS = 256
_PART_BYTES = 1 << 20
_LAST_INDEX = 2**48  # text read as an index is far above


def matches(path: Path) -> bool:
    """Whether times never decrease and next requests lie ahead, in the first records."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(_DETECTION_RECORDS * RECORD.itemsize)
    if head.startswith(ZSTD_MAGIC):
        return ".oraclegeneral" in path.name.lower()
    records = _whole_records(head)
    upcoming = records["next"]
    none = (upcoming == -1) | (upcoming == np.iinfo(np.int64).max)
    ahead = (upcoming > np.arange(len(records))) & (upcoming < _LAST_INDEX)
    in_order = np.diff(records["time"].astype(np.int64)) >= 0
    return len(records) > 0 and bool((none | ahead).all() and in_order.all())


def read(path: Path, options: ReadOptions, on_bad_record: OnBadRecord) -> Trace:
    """See ``TraceReader``; every request asks for one block of one token."""
    raw = _content(path)
    records = _whole_records(raw)
    if len(raw) % RECORD.itemsize:
        on_bad_record(BadRecord(path, len(records) + 1, f"cut off: a record has {RECORD.itemsize} bytes"))
    seconds = records["time"].astype(np.float64)
    backwards = seconds < np.maximum.accumulate(seconds)
    for index in np.flatnonzero(backwards):
        on_bad_record(BadRecord(path, int(index) + 1, "arrives before the record ahead of it"))
    kept = records[~backwards]
    seconds = seconds[~backwards]
    requests = len(kept)
    return Trace(
        name=path.name.split(".")[0],
        block_tokens=1,
        blocks=number_by_first_use(kept["object"]),
        offsets=np.arange(requests + 1, dtype=np.int64),
        parents=None,
        input_tokens=np.ones(requests, dtype=np.int64),
        output_tokens=np.zeros(requests, dtype=np.int64),
        seconds=seconds - seconds[0] if requests else seconds,
        answer_ends=np.zeros(requests, dtype=np.int8),
    )


def number_by_first_use(names: npt.NDArray[Any]) -> IntArray:
    """Dense numbers in order of first appearance, one per distinct name; int64, shape of ``names``."""
    _, first, inverse = np.unique(names, return_index=True, return_inverse=True)
    numbers = np.empty(len(first), dtype=np.int64)
    numbers[np.argsort(first)] = np.arange(len(first))
    return numbers[inverse]


def _whole_records(raw: bytes) -> npt.NDArray[Any]:
    return np.frombuffer(raw, dtype=RECORD, count=len(raw) // RECORD.itemsize)


def _content(path: Path) -> bytes:
    raw = path.read_bytes()
    if not raw.startswith(ZSTD_MAGIC):
        return raw
    if find_spec("zstandard") is None:
        raise TraceError(f"{path}: compressed with zstd: pip install zstandard, or decompress it first")
    import zstandard

    content, packed, start = bytearray(), memoryview(raw), 0
    try:
        while start < len(packed):  # frame by frame, for only a frame tells whether its end is there
            frame = zstandard.ZstdDecompressor().decompressobj()
            while not frame.eof:
                part = packed[start : start + _PART_BYTES]
                if not part:
                    raise TraceError(f"{path}: zstd stream cut off: fetch it again")
                content += frame.decompress(part)
                start += len(part) - len(frame.unused_data)
    except zstandard.ZstdError as error:
        raise TraceError(f"{path}: damaged zstd stream: {error}") from error
    return bytes(content)

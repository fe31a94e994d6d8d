"""Traces in the format of libCacheSim, plain and in zstd streams."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance_lab.replay.formats import oracle_general
from sgl_importance_lab.replay.formats.detect import detect_reader, read_trace
from sgl_importance_lab.replay.formats.line_reader import TraceError
from sgl_importance_lab.replay.formats.oracle_general import RECORD, number_by_first_use

NO_NEXT = -1


def _oracle(path: Path, *objects: int) -> Path:
    records = np.zeros(len(objects), dtype=RECORD)
    records["time"] = np.arange(len(objects))
    records["object"] = objects
    records["size"] = 4096
    records["next"] = NO_NEXT
    path.write_bytes(records.tobytes())
    return path


def test_oracle_general(tmp_path: Path) -> None:
    path = _oracle(tmp_path / "t.oracleGeneral", 2**63 + 5, 9, 2**63 + 5)
    assert detect_reader(path).NAME == "oracle-general"
    trace = read_trace(path)
    assert trace.parents is None
    assert trace.blocks.tolist() == [0, 1, 0]
    assert trace.offsets.tolist() == [0, 1, 2, 3]
    assert trace.seconds.tolist() == [0.0, 1.0, 2.0]
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(TraceError, match=r"t.oracleGeneral:3: cut off"):
        read_trace(path, format_name="oracle-general")


def test_oracle_general_in_a_zstd_stream(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    plain = _oracle(tmp_path / "t.oracleGeneral", 4, 5, 4)
    packed = tmp_path / "t.oracleGeneral.zst"
    packed.write_bytes(zstandard.ZstdCompressor().compress(plain.read_bytes()))
    assert read_trace(packed).blocks.tolist() == [0, 1, 0]


def test_oracle_general_in_a_zstd_stream_of_which_a_part_was_fetched(tmp_path: Path) -> None:
    """Its blocks are of 128 KiB, and every third of them ends with a record: the rest would not be missed."""
    zstandard = pytest.importorskip("zstandard")
    plain = _oracle(tmp_path / "t.oracleGeneral", *range(20_000))
    content = plain.read_bytes()
    frame = zstandard.ZstdCompressor().compress(content)
    packed = tmp_path / "t.oracleGeneral.zst"
    packed.write_bytes(frame + frame)
    records = RECORD.itemsize
    assert oracle_general._content(packed) == content * 2
    lengths = set()
    for end in range(len(frame) // 100, len(frame), len(frame) // 100):
        with zstandard.ZstdDecompressor().stream_reader(frame[:end]) as stream:
            lengths.add(len(stream.read()) % records)
        for part in (frame[:end], frame + frame[:end]):
            packed.write_bytes(part)
            with pytest.raises(TraceError, match=r"t\.oracleGeneral\.zst: zstd stream cut off"):
                read_trace(packed)
    assert 0 in lengths, "what is there of one of them is whole records"


@given(st.lists(st.integers(0, 20)))
def test_numbers_follow_first_use(names: list[int]) -> None:
    ids: dict[int, int] = {}
    expected = [ids.setdefault(name, len(ids)) for name in names]
    assert number_by_first_use(np.array(names, dtype=np.uint64)).tolist() == expected

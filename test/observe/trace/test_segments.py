"""The budget of a recording's directory, which several servers may share."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_importance.observe.trace import segments
from sgl_importance.observe.trace.segments import SegmentStore, segment_files, segment_number

MAX_BYTES = 8_000  # of segments of 1,000 bytes


def numbers(directory: Path) -> list[int]:
    return [segment_number(file) for file in segment_files(directory)]


def fill(store: SegmentStore, segments: int) -> None:
    for _ in range(segments):
        store.open_next()
        store.append(bytes(1_000))
        store.enforce_budget()


def test_the_oldest_go_first(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path, MAX_BYTES)
    fill(store, 20)
    store.close()
    assert numbers(tmp_path) == list(range(20))[-len(numbers(tmp_path)) :]
    assert sum(file.stat().st_size for file in segment_files(tmp_path)) <= MAX_BYTES + 1_100


def test_a_recording_is_for_nobody_else_to_read(tmp_path: Path) -> None:
    directory = tmp_path / "recordings" / "dp0"
    store = SegmentStore(directory, MAX_BYTES)
    fill(store, 1)
    store.close()
    assert {path.stat().st_mode & 0o777 for path in (directory, directory.parent)} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in segment_files(directory)} == {0o600}


def test_a_segment_that_another_server_is_writing_stays(tmp_path: Path) -> None:
    """It has written little for long: its segment is the oldest."""
    slow, busy = SegmentStore(tmp_path, MAX_BYTES), SegmentStore(tmp_path, MAX_BYTES)
    assert slow.open_next() == 0
    fill(busy, 20)
    assert numbers(tmp_path)[0] == 0
    slow.close()
    fill(busy, 1)
    assert 0 not in numbers(tmp_path), "it is like any other once it is closed"
    busy.close()


def test_a_segment_that_another_server_deletes_meanwhile_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SegmentStore(tmp_path, MAX_BYTES)
    fill(store, 7)
    deleted = segment_files(tmp_path)[0]
    deleted.unlink()
    monkeypatch.setattr(segments, "segment_files", lambda directory: [deleted, *segment_files(directory)])
    fill(store, 5)
    store.close()
    assert numbers(tmp_path) == list(range(12))[-len(numbers(tmp_path)) :]
    assert sum(file.stat().st_size for file in segment_files(tmp_path)) <= MAX_BYTES + 1_100


def test_a_segment_that_cannot_be_opened_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is another user's."""
    store = SegmentStore(tmp_path, MAX_BYTES)
    fill(store, 3)
    foreign, original = segment_files(tmp_path)[1], Path.open

    def refuse(file: Path, mode: str) -> object:
        if file == foreign:
            raise PermissionError(file)
        return original(file, mode)

    monkeypatch.setattr(Path, "open", refuse)
    fill(store, 15)
    store.close()
    assert numbers(tmp_path)[0] == 1

"""The format: what goes in comes out, whatever a crash cuts off; memory and disk stay within bounds."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.nodes.digests import chain_digests, root_digest
from sgl_importance.observe.trace import TraceError, open_trace
from sgl_importance.observe.trace import record_writer as writer_module
from sgl_importance.observe.trace import segments as segments_module
from sgl_importance.observe.trace.reader import TraceReader, check_continues
from sgl_importance.observe.trace.record_writer import RecordWriter
from sgl_importance.observe.trace.records import (
    AnswerTold,
    Dropped,
    EventKind,
    Fold,
    Header,
    Record,
    RequestAdmitted,
    RequestFinished,
    Step,
    TreeEvent,
    decode,
    encode,
)
from sgl_importance.observe.trace.segments import segment_files
from sgl_importance.observe.trace.token_sequence import TokenSequence
from sgl_importance.observe.trace.writer import NO_PAGES, TraceWriter

from support.waiting import HANG_SECONDS, wait_until
from support.workloads.recordings import PAGE_SIZE, make_header


def make_admitted(request: int, tokens: int = 0) -> RequestAdmitted:
    return RequestAdmitted(request, f"r{request}", request + 1, 7, 1, tokens, {"device": 0}, NO_PAGES)


def write(folder: Path, items: list[tuple[Record, TokenSequence | None]], **options: Any) -> TraceWriter:
    writer = TraceWriter(folder, make_header(), **{"max_bytes": 1 << 30, **options})
    for item in items:
        writer.put(*item)
    writer.close()
    return writer


def same(left: Record, right: Record) -> bool:
    return encode(left) == encode(right)


floats = st.floats(0, 1, width=16)
vectors = st.lists(floats, max_size=40)
small = st.integers(0, 2**31)
records = st.one_of(
    st.builds(
        lambda body, peak, weight, first, query: Fold(
            0, query, query, weight, first, np.array(body, np.float32), np.array(peak, np.float32)
        ),
        vectors,
        vectors,
        st.floats(0, 1),
        st.booleans(),
        small,
    ),
    st.builds(
        lambda mass, length: Step(1, "decode", length, 1, *(np.array(mass, np.float16),) * 3), vectors, small
    ),
    st.builds(
        TreeEvent,
        st.sampled_from(EventKind),
        st.sampled_from(["device", "host", "storage"]),
        small,
        st.none() | small,
        small,
        small,
        small,
        small,
        st.binary(max_size=16),
    ),
    st.builds(AnswerTold, small, small, small, st.sampled_from(["tool_call", "end_of_turn"])),
    st.builds(Dropped, small),
)


@given(records)
def test_a_record_comes_back_as_it_went_in(record: Record) -> None:
    again = decode(encode(record))
    assert type(again) is type(record)
    assert same(again, record)


@settings(max_examples=60, deadline=None)
@given(st.lists(records, max_size=12), st.data())
def test_whatever_a_crash_cuts_off_the_rest_is_read(items: list[Record], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, [(item, None) for item in items])
        (file,) = segment_files(folder)
        content = file.read_bytes()
        cut = data.draw(st.integers(0, len(content)))
        tail = data.draw(st.sampled_from([b"", b"\0" * 64, b"\xff" * 9]))
        file.write_bytes(content[:cut] + tail)
        reader = open_trace(folder)
        found = [record for record in reader if not isinstance(record, Header)]
        assert all(map(same, found, items))
        # Nothing whole is lost: what is missing is behind the cut.
        whole = len(content[:cut] + tail) - reader.torn_bytes
        assert whole <= cut
        if cut == len(content):
            assert len(found) == len(items)
            assert reader.torn_bytes == len(tail)


@settings(max_examples=40, deadline=None)
@given(st.lists(records, min_size=2, max_size=8), st.data())
def test_a_damaged_byte_ends_the_segment_before_it(items: list[Record], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, [(item, None) for item in items])
        (file,) = segment_files(folder)
        content = bytearray(file.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
        file.write_bytes(content)
        reader = open_trace(folder)
        found = [record for record in reader if not isinstance(record, Header)]
        assert len(found) < len(items) or reader.torn_bytes == 0
        assert all(map(same, found, items))
        assert reader.torn_bytes > 0


def test_pages_are_named_by_the_chained_digests_of_their_tokens(tmp_path: Path) -> None:
    first, second = list(range(11)), [*range(8), 90, 91, 92, 93]
    items = [
        (make_admitted(0, 11), TokenSequence((None, None), first)),
        (make_admitted(1, 12), TokenSequence((None, None), second)),
        (RequestFinished(0, 2, 9, "stop", 3, NO_PAGES), TokenSequence((None, None), [*first, 5, 6])),
        (make_admitted(2, 11), TokenSequence(("adapter", None), first)),
    ]
    write(tmp_path, items)
    reader = open_trace(tmp_path)
    pages = [record.pages.tolist() for record in reader if not isinstance(record, Header)]
    assert pages == [[0, 1], [0, 1, 2], [0, 1, 3], [4, 5]]
    for numbers, (_, sequence) in zip(pages, items, strict=True):
        root = root_digest(*sequence.namespace)
        assert [reader.digest(n) for n in numbers] == chain_digests(root, sequence.tokens, PAGE_SIZE)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=40), max_size=12), st.integers(400, 4000))
def test_page_numbers_mean_the_same_over_segments(prompts: list[list[int]], max_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        items = [(make_admitted(i), TokenSequence((), tokens)) for i, tokens in enumerate(prompts)]
        writer = TraceWriter(Path(name), make_header(), max_bytes=max_bytes)
        for item in items:
            writer.put(*item)
        writer.close()
        reader = open_trace(Path(name))
        for record in reader:
            if isinstance(record, RequestAdmitted):
                expected = chain_digests(root_digest(), prompts[record.request], PAGE_SIZE)
                assert [reader.digest(page) for page in record.pages] == expected


def test_disk_stays_within_its_budget_and_the_youngest_records_survive(tmp_path: Path) -> None:
    budget, vector = 200_000, np.zeros(250, np.float32)
    write(tmp_path, [(Fold(i, i, i, 1.0, True, vector, vector), None) for i in range(400)], max_bytes=budget)
    size = sum(file.stat().st_size for file in segment_files(tmp_path))
    assert budget / 2 < size <= budget * 1.02
    found = [record.request for record in open_trace(tmp_path) if isinstance(record, Fold)]
    assert found == list(range(found[0], 400))
    assert found[0] > 0


def test_a_second_server_goes_on_behind_the_first(tmp_path: Path) -> None:
    for run in ("one", "two"):
        writer = TraceWriter(tmp_path, make_header(run=run), max_bytes=1 << 20)
        writer.put(make_admitted(0))
        writer.close()
    kinds = [record.run if isinstance(record, Header) else "admitted" for record in open_trace(tmp_path)]
    assert kinds == ["one", "admitted", "two", "admitted"]


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({}, None),
        ({"model": "other"}, "another model, .* and other"),
        ({"page_size": 64}, "another page size"),
    ],
)
def test_a_recording_is_gone_on_with_by_servers_of_the_same_pages(
    tmp_path: Path, changes: dict[str, Any], difference: str | None
) -> None:
    header = msgspec.structs.replace(make_header(run="two"), **changes)
    check_continues(tmp_path, header)  # nothing is there yet
    TraceWriter(tmp_path, make_header(run="one"), max_bytes=1 << 20).close()
    with pytest.raises(TraceError, match=difference) if difference else contextlib.nullcontext():
        check_continues(tmp_path, header)


def test_a_recording_of_which_a_crash_left_nothing_whole_is_gone_on_with(tmp_path: Path) -> None:
    TraceWriter(tmp_path, make_header(run="one"), max_bytes=1 << 20).close()
    (file,) = segment_files(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    check_continues(tmp_path, msgspec.structs.replace(make_header(run="two"), model="other"))


def test_what_is_known_of_the_server_with_the_first_request_is_in_its_header(tmp_path: Path) -> None:
    """sglang makes the host tier behind the header; segments that begin later say its size at once."""
    header = make_header(capacity_tokens={"device": 128})
    writer = RecordWriter(tmp_path, header, max_bytes=1 << 20)
    sized = msgspec.structs.replace(header, capacity_tokens={"device": 128, "host": 512})
    for record in (Dropped(0), sized, make_admitted(1)):
        writer.write(record)
    writer._start_segment()
    writer.write(make_admitted(2))
    writer.close()
    whole = open_trace(tmp_path)
    assert whole.header.capacity_tokens == sized.capacity_tokens
    assert [type(record) for record in whole] == [Header, Dropped, RequestAdmitted, RequestAdmitted]
    assert [each.segment for each in whole.headers] == [1], "the last that was read"
    files = segment_files(tmp_path)
    assert TraceReader(tmp_path, files[-1:]).header.capacity_tokens == sized.capacity_tokens


def test_a_segment_that_goes_while_others_are_read_is_left_out(tmp_path: Path) -> None:
    """A server that still records deletes its oldest ones."""
    for run in ("one", "two", "three"):
        TraceWriter(tmp_path, make_header(run=run), max_bytes=1 << 20).close()
    reader = open_trace(tmp_path)
    (tmp_path / "segment-000001.sgltrace").unlink()
    assert [record.run for record in reader if isinstance(record, Header)] == ["one", "three"]


def test_what_a_server_adds_while_others_read_is_no_damage(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, make_header(), max_bytes=1 << 20)
    writer.write(make_admitted(0), [])
    writer.flush()
    reader = open_trace(tmp_path)
    records = iter(reader)
    next(records)
    for request in range(1, 2000):  # more than is read ahead
        writer.write(make_admitted(request), [])
    writer.close()
    assert len(list(records)) > 1
    assert reader.torn_bytes == 0


def test_a_segment_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    TraceWriter(tmp_path, make_header(), max_bytes=1 << 20).close()
    (tmp_path / "segment-000001.sgltrace").mkdir()
    with pytest.raises(TraceError, match=r"segment-000001\.sgltrace cannot be read .*: remove it"):
        list(open_trace(tmp_path))


def test_a_copy_of_a_segment_is_none(tmp_path: Path) -> None:
    TraceWriter(tmp_path, make_header(run="one"), max_bytes=1 << 20).close()
    copy = tmp_path / "segment-000000 (copy).sgltrace"
    copy.write_bytes((tmp_path / "segment-000000.sgltrace").read_bytes())
    TraceWriter(tmp_path, make_header(run="two"), max_bytes=1 << 20).close()
    assert [record.run for record in open_trace(tmp_path) if isinstance(record, Header)] == ["one", "two"]
    assert copy.exists()


def test_a_number_that_another_server_takes_meanwhile_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = segments_module.segment_files

    def slowly(directory: Path) -> list[Path]:
        files = found(directory)
        if not files:
            (directory / "segment-000000.sgltrace").touch()
        return files

    monkeypatch.setattr(segments_module, "segment_files", slowly)
    store = segments_module.SegmentStore(tmp_path, 1 << 20)
    assert store.open_next() == 1
    store.close()


def test_a_slow_disk_drops_records_and_says_how_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_works = threading.Event()
    encode_now = writer_module.encode

    def encode_late(record: Record) -> bytes:
        if not isinstance(record, Header):
            disk_works.wait(HANG_SECONDS)
        return encode_now(record)

    monkeypatch.setattr(writer_module, "encode", encode_late)
    writer = TraceWriter(tmp_path, make_header(), max_bytes=1 << 20, queue_bytes=4000)
    taken = [writer.put(make_admitted(i)) for i in range(100)]
    disk_works.set()
    writer.close()
    reader = open_trace(tmp_path)
    written = [record.request for record in reader if isinstance(record, RequestAdmitted)]
    assert written == [i for i, was_taken in enumerate(taken) if was_taken]
    assert 0 < len(written) < 100
    assert reader.dropped == 100 - len(written)


def test_an_error_of_the_disk_ends_the_recording_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = TraceWriter(tmp_path, make_header(), max_bytes=1 << 20)

    def full(record: Record) -> bytes:
        raise OSError("No space left on device")

    monkeypatch.setattr(writer_module, "encode", full)
    writer.put(make_admitted(0))
    wait_until(lambda: writer._worker.has_failed)
    assert not writer.put(make_admitted(1))
    assert "No space left on device" in caplog.text
    writer.close()
    assert [type(record) for record in open_trace(tmp_path)] == [Header]


def test_no_recording_is_one_line_that_names_the_cure(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no recording in .*--kv-importance-trace"):
        open_trace(tmp_path)


def test_recordings_of_replicas_are_named_where_the_directory_above_has_none(tmp_path: Path) -> None:
    for name in ("dp10", "dp2", "dpx"):
        TraceWriter(tmp_path / name, make_header(), max_bytes=1 << 20).close()
    (tmp_path / "dp3").mkdir()
    with pytest.raises(TraceError, match=r"no recording in .* in dp2, dp10: give one of .*trace merge"):
        open_trace(tmp_path)


def test_segments_do_not_grow_with_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer keeps every page of its segment in memory."""
    assert segments_module.MOST_SEGMENT_BYTES == 32 << 20
    monkeypatch.setattr(segments_module, "MOST_SEGMENT_BYTES", 10_000)
    vector = np.zeros(250, np.float32)
    items = [(Fold(i, i, i, 1.0, True, vector, vector), None) for i in range(100)]
    write(tmp_path, items, max_bytes=1 << 40)
    sizes = [file.stat().st_size for file in segment_files(tmp_path)]
    assert len(sizes) > 10
    assert max(sizes) < 14_000
    assert sum(isinstance(record, Fold) for record in open_trace(tmp_path)) == 100


def test_another_version_is_named(tmp_path: Path) -> None:
    TraceWriter(tmp_path, make_header(version=9), max_bytes=1 << 20).close()
    with pytest.raises(TraceError, match="version 9, not 1"):
        list(open_trace(tmp_path))

"""What other tools get out of a recording."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from sgl_importance.observe.trace import open_trace
from sgl_importance.observe.trace.arrivals import arrivals
from sgl_importance.observe.trace.cli import app
from sgl_importance.observe.trace.merge import merge_recordings
from sgl_importance.observe.trace.record_writer import RecordWriter
from sgl_importance.observe.trace.records import (
    AnswerTold,
    Record,
    RequestAdmitted,
    RequestFinished,
    decode,
    encode,
)
from sgl_importance.observe.trace.token_sequence import TokenSequence
from sgl_importance.observe.trace.writer import NO_PAGES, TraceWriter
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance_lab.replay.formats.detect import read_trace
from sgl_importance_lab.replay.formats.line_reader import ReadOptions
from sgl_importance_lab.replay.formats.line_reader import TraceError as ReplayTraceError
from sgl_importance_lab.study.recording import load_recording

from support.workloads.recordings import PAGE_SIZE, make_header


def record(folder: Path) -> None:
    """Three requests of two pages and more; the second waited long, so it arrived first."""

    def admit(request: int, rid: str, at: int, queued: int, tokens: list[int], cached: int) -> None:
        admitted = RequestAdmitted(
            request, rid, request + 1, at, queued, len(tokens), {"device": cached, "host": 1}, NO_PAGES
        )
        items.append((admitted, TokenSequence((None, None), tokens)))

    items: list[tuple[Record, TokenSequence | None]] = []
    admit(0, "chat/0/0", 5_000_000, 10_000, list(range(9)), 0)
    admit(1, "chat/1/1", 6_000_000, 4_000_000, [*range(4), *range(70, 74)], 3)
    admit(2, "HEALTH_CHECK_1", 7_000_000, 0, [1] * 4, 0)
    finished = RequestFinished(1, 3, 8_000_000, "stop", 6, NO_PAGES, answer_end="tool_call")
    items.append((finished, TokenSequence((None, None), list(range(12)))))
    writer = TraceWriter(folder, make_header(), max_bytes=1 << 20)
    for item in items:
        writer.put(*item)
    writer.close()


def test_requests_come_in_order_of_arrival(tmp_path: Path) -> None:
    record(tmp_path)
    first, second = arrivals(open_trace(tmp_path))
    assert (first.rid, first.seconds, first.output_tokens, first.cached_tokens) == ("chat/1/1", 2.0, 6, 4)
    assert (second.rid, second.seconds, second.output_tokens, second.input_tokens) == ("chat/0/0", 4.99, 0, 9)
    assert (first.answer_end, second.answer_end) == ("tool_call", "unknown")
    assert read_trace(tmp_path).answer_ends.tolist() == [AnswerEnd.TOOL_CALL, AnswerEnd.UNKNOWN]


def test_a_recording_from_before_ends_were_told_is_read() -> None:
    """The field is the last of its record, so older recordings lack it."""
    old = encode(RequestFinished(1, 3, 8_000_000, "stop", 6, NO_PAGES))
    fields = msgspec.msgpack.decode(old)
    assert fields.pop() == "unknown"
    read = decode(msgspec.msgpack.encode(fields))
    assert isinstance(read, RequestFinished)
    assert (read.output_tokens, read.answer_end) == (6, "unknown")


def test_what_is_told_later_amends_the_end(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, make_header(), max_bytes=1 << 20)
    tokens = TokenSequence((None, None), list(range(4)))
    for number in range(3):
        writer.put(RequestAdmitted(number, f"a/{number}", number + 1, number, 0, 4, {}, NO_PAGES), tokens)
    writer.put(RequestFinished(0, 3, 10, "stop", 1, NO_PAGES), tokens)
    writer.put(RequestFinished(1, 3, 11, "stop", 1, NO_PAGES), tokens)
    writer.put(AnswerTold(1, 3, 12, "tool_call"))
    writer.put(AnswerTold(2, 3, 13, "end_of_turn"))  # the writer could not keep up with its end
    writer.close()
    found = [each.answer_end for each in arrivals(open_trace(tmp_path))]
    assert found == ["unknown", "tool_call", "end_of_turn"]


def test_requests_of_two_servers_in_one_directory_are_told_apart(tmp_path: Path) -> None:
    """They record at a time, so that their segments alternate; both number their requests from 0."""
    both = tmp_path / "both"
    writers = {  # of segments of 7,500 bytes
        name: RecordWriter(both, make_header(run=name, created=created), max_bytes=60_000)
        for name, created in (("one", 100.0), ("two", 107.0))
    }
    expected = []
    for number in range(60):
        for name, writer in writers.items():
            rid, second = f"{name}/{number}", number + (7 if name == "two" else 0)
            writer.write(
                RequestAdmitted(number, rid, number + 1, number * 10**6, 0, 4, {}, NO_PAGES), [b"x" * 16]
            )
            writer.write(RequestFinished(number, number + 1, number * 10**6, "stop", 1, NO_PAGES), [])
            end = "tool_call" if name == "one" else "end_of_turn"
            writer.write(AnswerTold(number, number + 1, number * 10**6, end))
            expected.append((float(second), rid, end))
    for writer in writers.values():
        writer.close()
    read = [(each.seconds, each.rid, each.answer_end) for each in arrivals(open_trace(both))]
    assert sorted(read) == sorted(expected)
    assert {query.rid for query in load_recording(both).queries} == {rid for _, rid, _ in expected}
    record(tmp_path / "other")
    merged = merge_recordings([both, tmp_path / "other"], tmp_path / "merged")
    assert merged.requests == len(expected) + 3
    again = arrivals(open_trace(tmp_path / "merged"))
    assert {(each.rid, each.answer_end) for each in again} >= {(rid, end) for _, rid, end in expected}


def test_no_request_comes_before_the_first_where_a_clock_was_put_back(tmp_path: Path) -> None:
    """The server started again an hour earlier than before, by its clock."""
    folder = tmp_path / "trace"
    for run, created in (("before", 7200.0), ("after", 3600.0)):
        writer = TraceWriter(folder, make_header(run=run, created=created), max_bytes=1 << 20)
        admitted = RequestAdmitted(0, f"{run}/0", 1, 10**6, 0, 4, {}, NO_PAGES)
        writer.put(admitted, TokenSequence((None, None), list(range(4))))
        writer.close()
    found = [(each.rid, each.seconds) for each in arrivals(open_trace(folder))]
    assert found == [("after/0", 1.0), ("before/0", 3601.0)]
    out = tmp_path / "out.jsonl"
    assert CliRunner().invoke(app, ["convert", str(folder), str(out)]).exit_code == 0
    assert read_trace(out, ReadOptions(block_tokens=PAGE_SIZE)).seconds.tolist() == [0.0, 3600.0]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"model": "another"}, "with another model, by hand and another"),
        ({"page_size": 8}, "with another page size, 4 and 8"),
    ],
)
def test_a_directory_of_servers_that_share_nothing_is_refused(
    tmp_path: Path, header: dict[str, Any], message: str
) -> None:
    """Their pages would be taken for each other's, or counted as of another size."""
    for run, changed in (("one", {}), ("two", header)):
        writer = TraceWriter(tmp_path, make_header(run=run, **changed), max_bytes=1 << 20)
        writer.put(
            RequestAdmitted(0, f"{run}/0", 1, 0, 0, 8, {}, NO_PAGES),
            TokenSequence((None, None), list(range(8))),
        )
        writer.close()
    with pytest.raises(ReplayTraceError, match=message):
        read_trace(tmp_path)
    result = CliRunner().invoke(app, ["info", str(tmp_path)])
    assert result.exit_code == 2
    assert "segment-000001.sgltrace" in result.stderr
    (tmp_path / "segment-000001.sgltrace").unlink()
    assert read_trace(tmp_path).num_requests == 1


def test_convert_writes_mooncakes_format(tmp_path: Path) -> None:
    record(tmp_path / "trace")
    out = tmp_path / "out.jsonl"
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "trace"), str(out)])
    assert result.exit_code == 0, result.output
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        {"timestamp": 2000, "input_length": 8, "output_length": 6, "hash_ids": [0, 1]},
        {"timestamp": 4990, "input_length": 9, "output_length": 0, "hash_ids": [0, 2, 3]},
    ]


def test_info_counts(tmp_path: Path) -> None:
    record(tmp_path)
    result = CliRunner().invoke(app, ["info", str(tmp_path), "--json"])
    facts = json.loads(result.output)
    assert (facts["requests"], facts["input_tokens"], facts["cached_tokens"]) == (2, 17, 5)
    assert facts["records"] == {"Header": 1, "RequestAdmitted": 3, "RequestFinished": 1}
    assert (facts["dropped"], facts["torn_bytes"]) == (0, 0)


def test_no_recording_is_one_error_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["info", str(tmp_path)])
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert line.startswith("error: no recording in")


def test_replay_reads_a_recording_and_its_conversion_alike(tmp_path: Path) -> None:
    record(tmp_path / "trace")
    out = tmp_path / "out.jsonl"
    CliRunner().invoke(app, ["convert", str(tmp_path / "trace"), str(out)])
    direct = read_trace(tmp_path / "trace")
    assert (direct.name, direct.block_tokens) == ("trace", PAGE_SIZE)
    assert [direct.request(i).tolist() for i in range(2)] == [[0, 1], [0, 2]]
    direct.check_integrity()
    converted = read_trace(out, ReadOptions(block_tokens=PAGE_SIZE))
    # Mooncake's format has an id for the page that is not full.
    assert [converted.request(i).tolist() for i in range(2)] == [[0, 1], [0, 2, 3]]
    for field in ("input_tokens", "output_tokens"):
        assert getattr(direct, field).tolist() == getattr(converted, field).tolist()
    assert direct.seconds.tolist() == pytest.approx(converted.seconds.tolist())

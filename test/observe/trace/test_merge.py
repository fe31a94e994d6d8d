"""Recordings of two servers become one: by time, and with what both have served as the same pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from sgl_importance.observe.trace import open_trace
from sgl_importance.observe.trace.arrivals import arrivals
from sgl_importance.observe.trace.cli import app
from sgl_importance.observe.trace.merge import merge_recordings
from sgl_importance.observe.trace.records import (
    AnswerTold,
    EventKind,
    Header,
    Record,
    RequestAdmitted,
    RequestFinished,
    TreeEvent,
)
from sgl_importance.observe.trace.token_sequence import TokenSequence
from sgl_importance.observe.trace.writer import NO_PAGES, TraceWriter
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance_lab.replay.formats.detect import read_trace
from sgl_importance_lab.replay.replay_runner import Job, run_job

from support.workloads.recordings import PAGE_SIZE, make_header

SYSTEM = list(range(8))  # two pages, of all requests without a salt


def _record(
    folder: Path, requests: list[tuple[float, list[int]]], salt: str | None = None, **header: Any
) -> Path:
    """Each request, second and prompt, is admitted at once and ends half a second later by a tool call.

    Of the first that is told another half a second later.
    """
    writer = TraceWriter(folder, make_header(run=folder.name, **header), max_bytes=1 << 20)
    for number, (seconds, tokens) in enumerate(requests):
        at = round(seconds * 1e6)
        sequence = TokenSequence((None, salt), tokens)
        rid = f"{folder.name}/{number}"
        admitted = RequestAdmitted(number, rid, number + 1, at, 0, len(tokens), {}, NO_PAGES)
        writer.put(admitted, sequence)
        event = TreeEvent(EventKind.INSERT, "device", number + 1, number, 1, 0, 0, 1, b"x" * 16)
        writer.put(event)
        end = "tool_call" if number else "unknown"
        ended = RequestFinished(number, number + 1, at + 500_000, "stop", 3, NO_PAGES, answer_end=end)
        writer.put(ended, sequence)
        if end == "unknown":
            writer.put(AnswerTold(number, number + 1, at + 1_000_000, "tool_call"))
    writer.close()
    return folder


def _prompt(*own: int) -> list[int]:
    return [*SYSTEM, *(100 * number + i for number in own for i in range(PAGE_SIZE))]


def _two(folder: Path) -> list[Path]:
    """The second server starts a second later; a session moves to it, and comes back."""
    first = _record(folder / "first", [(0.0, _prompt(1)), (4.0, _prompt(1, 2, 3))], created=1000.0)
    second = _record(folder / "second", [(1.0, _prompt(1, 2)), (2.0, _prompt(7))], created=1001.0)
    return [first, second]


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["merge", *map(str, arguments)])


def test_requests_come_by_time_and_equal_prompts_have_equal_pages(tmp_path: Path) -> None:
    directories = _two(tmp_path)
    result = _run(*reversed(directories), tmp_path / "merged")
    assert result.exit_code == 0, result.output
    assert (
        result.output
        == f"4 requests of 2 recordings in {tmp_path / 'merged'}; 6 pages, 4 of them in more than one\n"
    )
    merged = arrivals(open_trace(tmp_path / "merged"))
    assert [(each.rid, each.seconds) for each in merged] == [
        ("first/0", 0.0),
        ("second/0", 2.0),
        ("second/1", 3.0),
        ("first/1", 4.0),
    ]
    assert [each.pages.tolist() for each in merged] == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [0, 1, 2, 3, 5]]
    assert {(each.output_tokens, each.answer_end) for each in merged} == {(3, "tool_call")}


def test_the_merged_recording_replays_as_one_cache(tmp_path: Path) -> None:
    directories = _two(tmp_path)
    merge_recordings(directories, tmp_path / "merged")
    traces = [read_trace(folder) for folder in (*directories, tmp_path / "merged")]
    assert traces[2].answer_ends.tolist() == [AnswerEnd.TOOL_CALL] * 4
    apart, also_apart, together = (run_job(traces, Job(index, "lru", 100)).hit_blocks for index in range(3))
    assert (apart, also_apart, together) == (3, 2, 9)


def test_only_requests_are_merged_and_counted_anew(tmp_path: Path) -> None:
    merge_recordings(_two(tmp_path), tmp_path / "merged")
    records: list[Record] = list(open_trace(tmp_path / "merged"))
    assert {type(record) for record in records} == {Header, RequestAdmitted, RequestFinished, AnswerTold}
    header = records[0]
    assert isinstance(header, Header)
    assert (header.created, header.capacity_tokens) == (1000.0, {"device": 128})
    admitted = [record for record in records if isinstance(record, RequestAdmitted)]
    assert [(record.request, record.clock) for record in admitted] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    ended = [
        (record.request, record.microseconds) for record in records if isinstance(record, RequestFinished)
    ]
    assert ended == [(0, 500_000), (1, 2_500_000), (2, 3_500_000), (3, 4_500_000)]
    told = [
        (record.request, record.clock, record.microseconds)
        for record in records
        if isinstance(record, AnswerTold)
    ]
    assert told == [(0, 1, 1_000_000), (1, 2, 3_000_000)]


def test_a_server_that_was_started_again_keeps_its_time(tmp_path: Path) -> None:
    first, second = _two(tmp_path)
    writer = TraceWriter(second, make_header(run="again", created=1010.0), max_bytes=1 << 20)
    admitted = RequestAdmitted(0, "again/0", 1, 0, 0, 4, {}, NO_PAGES)
    writer.put(admitted, TokenSequence((None, None), SYSTEM[:4]))
    writer.close()
    merge_recordings([first, second], tmp_path / "merged")
    last = arrivals(open_trace(tmp_path / "merged"))[-1]
    assert (last.rid, last.seconds, last.pages.tolist()) == ("again/0", 10.0, [0])


def test_servers_that_shared_a_directory_are_put_in_order_of_time(tmp_path: Path) -> None:
    """Their segments alternate, and the clock of one that came later was behind."""
    third = _record(tmp_path / "third", [(2.5, SYSTEM)], created=1000.0)
    shared = _record(tmp_path / "shared", [(0.0, SYSTEM), (4.0, SYSTEM)], created=1000.0)
    for run, created in (("beside", 1001.0), ("behind", 990.0)):
        other = _record(tmp_path / run, [(0.0, SYSTEM), (1.0, SYSTEM)], created=created)
        next(other.iterdir()).rename(shared / f"segment-00000{len(list(shared.iterdir()))}.sgltrace")
        other.rmdir()
    assert _run(third, shared, tmp_path / "merged").exit_code == 0
    admitted = [r for r in open_trace(tmp_path / "merged") if isinstance(r, RequestAdmitted)]
    assert [(record.rid, record.microseconds // 10**6) for record in admitted] == [
        ("behind/0", 0),
        ("behind/1", 1),
        ("shared/0", 10),
        ("beside/0", 11),
        ("beside/1", 12),
        ("third/0", 12),
        ("shared/1", 14),
    ]
    assert [record.clock for record in admitted] == list(range(1, 8))


def test_salted_prompts_stay_apart(tmp_path: Path) -> None:
    first = _record(tmp_path / "first", [(0.0, SYSTEM)])
    second = _record(tmp_path / "second", [(1.0, SYSTEM)], salt="of a tenant")
    assert merge_recordings([first, second], tmp_path / "merged").shared_pages == 0


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"model": "another"}, "differ in model, another and by hand: merge recordings of one model"),
        ({"page_size": 8}, "differ in page size, 8 and 4: merge recordings of --page-size"),
    ],
)
def test_recordings_that_share_nothing_are_refused(
    tmp_path: Path, header: dict[str, Any], message: str
) -> None:
    first = _record(tmp_path / "first", [(0.0, SYSTEM)])
    second = _record(tmp_path / "second", [(0.0, SYSTEM)], **header)
    result = _run(first, second, tmp_path / "merged")
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "merged").exists()


def test_wrong_names_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    first, second = _two(tmp_path)
    for arguments, message in (
        ((first, tmp_path / "merged"), "one recording is as it is"),
        ((first, second, second, tmp_path / "merged"), "repeats a run of another: name each recording once"),
        ((first, tmp_path / "nothing", tmp_path / "merged"), "no recording in"),
        ((first, second, second), "is there already: name a directory that is not"),
        ((first, second, tmp_path / "no" / "merged"), "create it first"),
    ):
        result = _run(*arguments)
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert {path.name for path in tmp_path.iterdir()} == {"first", "second"}

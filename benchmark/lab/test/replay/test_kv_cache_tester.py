"""Sessions of kv-cache-tester: what is read of them, and how they are merged."""

from __future__ import annotations

import gzip
import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance_lab.replay.formats import kv_cache_tester
from sgl_importance_lab.replay.formats.detect import detect_reader, read_trace
from sgl_importance_lab.replay.formats.kv_cache_tester import (
    Session,
    SessionRequest,
    in_order,
    merge_sessions,
)
from sgl_importance_lab.replay.formats.line_reader import (
    BadRecord,
    ReadOptions,
    TraceError,
    refuse_bad_record,
)

from support.workloads.replay_traces import shared_data


def request(t: float, ids: list[int], stop: str = "tool_use", **fields: Any) -> dict[str, Any]:
    tokens = 64 * len(ids) + 5
    return {"t": t, "type": "n", "in": tokens, "out": 9, "stop": stop, "hash_ids": ids, **fields}


def session(*requests: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"id": "a", "models": ["m"], "block_size": 64, "requests": list(requests), **fields}


def write(path: Path, *sessions: dict[str, Any]) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in sessions).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


ONE_BY_ONE = ReadOptions(alive=1)


def test_a_packed_file_a_plain_one_and_a_folder_say_the_same(tmp_path: Path) -> None:
    first = session(request(0.0, [1, 2]), request(3.0, [1, 2, 3], "end_turn"))
    second = session(request(0.0, [1, 7]))
    folder = tmp_path / "sessions"
    folder.mkdir()
    write(folder / "trace_0001.json", first)
    write(folder / "trace_0002.json", second)
    traces = [
        read_trace(write(tmp_path / "a.jsonl.gz", first, second), ONE_BY_ONE),
        read_trace(write(tmp_path / "a.jsonl", first, second), ONE_BY_ONE),
        read_trace(folder, ONE_BY_ONE),
    ]
    for trace in traces:
        trace.check_integrity()
        assert trace.blocks.tolist() == traces[0].blocks.tolist()
        assert trace.answer_ends.tolist() == traces[0].answer_ends.tolist()
    assert traces[0].num_blocks == 5, "ids are local to their session"
    assert detect_reader(folder).NAME == detect_reader(tmp_path / "a.jsonl.gz").NAME == "kv-cache-tester"


def test_runs_stand_for_ids_and_global_ids_are_shared(tmp_path: Path) -> None:
    runs = request(0.0, [1, 2, 3, 9])
    del runs["hash_ids"]
    runs["hash_runs"] = [1, 3, 9, 1]
    path = write(
        tmp_path / "a.jsonl",
        session(runs, hash_id_scope="global"),
        session(request(0.0, [1, 2]), hash_id_scope="global"),
    )
    assert read_trace(path).num_blocks == 4


def test_blocks_are_joined_and_what_is_left_does_not_count(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", session(request(0, list(range(1, 20))), request(1, [1, 2, 3, 4, 99])))
    trace = read_trace(path, ReadOptions(block_tokens=256))
    assert [trace.request(index).tolist() for index in range(2)] == [[0, 1, 2, 3], [0]]
    assert trace.input_tokens.tolist() == [64 * 19 + 5, 64 * 5 + 5]
    with pytest.raises(TraceError, match="must be a multiple of that, not 100"):
        read_trace(path, ReadOptions(block_tokens=100))


def test_ends_of_answers(tmp_path: Path) -> None:
    stops = ["tool_use", "end_turn", "", "max_tokens", "stop_sequence", "refusal"]
    path = write(tmp_path / "a.jsonl", session(*(request(t, [1], stop) for t, stop in enumerate(stops))))
    assert read_trace(path).answer_ends.tolist() == [
        AnswerEnd.TOOL_CALL,
        AnswerEnd.END_OF_TURN,
        AnswerEnd.UNKNOWN,
        AnswerEnd.LENGTH,
        AnswerEnd.END_OF_TURN,
        AnswerEnd.UNKNOWN,
    ]


def test_a_sub_agent_ran_before_its_entry(tmp_path: Path) -> None:
    nested = [request(0.0, [50]), request(4.0, [50, 51], "end_turn")]
    sub_agent = {"t": 20.0, "type": "subagent", "duration_ms": 12_000, "requests": nested}
    path = write(tmp_path / "a.jsonl", session(request(0.0, [1]), sub_agent, request(21.0, [1, 2])))
    trace = read_trace(path, ONE_BY_ONE)
    assert trace.seconds.tolist() == [0.0, 8.0, 12.0, 21.0]
    assert trace.output_tokens.tolist() == [9] * 4


def test_a_sub_agent_that_nobody_waited_for_begins_at_its_entry(tmp_path: Path) -> None:
    nested = [request(0.0, [50]), request(4.0, [50, 51], "end_turn")]
    launched = {"t": 20.0, "type": "subagent", "duration_ms": None, "status": "async_launched"}
    path = tmp_path / "a.jsonl"
    for entry in (launched, {"t": 20.0, "type": "subagent"}):
        write(path, session(request(0.0, [1]), {**entry, "requests": nested}, request(21.0, [1, 2])))
        assert read_trace(path, ONE_BY_ONE).seconds.tolist() == [0.0, 20.0, 21.0, 24.0]


def test_what_a_session_need_not_say_may_be_missing_or_null(tmp_path: Path) -> None:
    """A sub-agent that was not recorded, an answer that was not watched, fields that nothing depends on."""
    bare = {"t": 3.0, "in": 69, "hash_ids": [1], "out": None, "stop": None}
    agents = [{"t": 4.0, "type": "subagent", **more} for more in ({}, {"requests": None}, {"requests": []})]
    record = {"block_size": 64, "hash_id_scope": None, "requests": [request(0.0, [1]), bare, *agents]}
    trace = read_trace(write(tmp_path / "a.jsonl", record))
    assert trace.seconds.tolist() == [0.0, 3.0]
    assert trace.output_tokens.tolist() == [9, 0]
    assert trace.answer_ends.tolist() == [AnswerEnd.TOOL_CALL, AnswerEnd.UNKNOWN]


def test_what_is_no_session_says_where_sessions_have_to_be(tmp_path: Path) -> None:
    path = tmp_path / "above" / "a.json"
    path.parent.mkdir()
    path.write_text(json.dumps(session(request(0.0, [1])), indent=1))
    with pytest.raises(
        TraceError, match=r"a.json:1: a session has to be on one line, or alone in a file of a folder"
    ):
        read_trace(path, format_name="kv-cache-tester")
    assert read_trace(path.parent).num_requests == 1
    with pytest.raises(TraceError, match=r"no \.json file in this folder: name the one that holds the sess"):
        read_trace(tmp_path, format_name="kv-cache-tester")
    assert not kv_cache_tester.matches(tmp_path)


def test_ids_that_stand_for_no_prefix_name_a_cure_that_this_format_has(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", session(request(0.0, [1, 2]), request(1.0, [3, 2])))
    with pytest.raises(TraceError, match=r"follows another .*leave such requests out with --skip"):
        read_trace(path)
    assert read_trace(path, on_bad_record=[].append).num_requests == 1


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (session({"t": 1.0, "type": "n"}), "has no `in`"),
        (session(request(0.0, [1], hash_runs=[1])), "a start without a count"),
        (session(request(0.0, [1], hash_runs=[1, 2**40])), "blocks in one prompt"),
        (session(request(0.0, [1, 2, 3, 4, 5], **{"in": 70})), "5 blocks of 64 for 70 tokens"),
        (session(request(-1.0, [1])), "Expected `float` >= 0"),
    ],
)
def test_bad_sessions_are_located(tmp_path: Path, bad: dict[str, Any], cause: str) -> None:
    path = write(tmp_path / "a.jsonl", session(request(0.0, [1])), bad)
    with pytest.raises(TraceError, match=f"a.jsonl:2: .*{cause}"):
        read_trace(path, format_name="kv-cache-tester")
    skipped: list[BadRecord] = []
    assert read_trace(path, on_bad_record=skipped.append).num_requests == 1
    assert [record.line for record in skipped] == [2]


def test_what_other_formats_cannot_do_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.gz", session(request(0.0, [1])))
    with pytest.raises(TraceError, match="leave out --object-level"):
        read_trace(path, ReadOptions(object_level=True))
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(TraceError, match="damaged or cut off"):
        read_trace(path, format_name="kv-cache-tester")
    record = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}
    with pytest.raises(TraceError, match="leave out --alive"):
        read_trace(write(tmp_path / "mooncake.jsonl", record), ONE_BY_ONE)


lengths = st.lists(st.lists(st.floats(0, 100), min_size=1, max_size=5), min_size=1, max_size=8)


@given(lengths, st.integers(1, 4), st.integers(0, 3))
def test_sessions_are_merged_whole_and_so_many_at_a_time(
    gaps: list[list[float]], alive: int, seed: int
) -> None:
    sessions = []
    for number, session_gaps in enumerate(gaps):
        times = np.cumsum(session_gaps) - session_gaps[0]
        requests = [SessionRequest(float(t), [(number, 0)], 64, 1, AnswerEnd.ABORT) for t in times]
        sessions.append(Session(Path("x"), number, requests))
    trace = merge_sessions("x", 64, sessions, alive, seed, refuse_bad_record)
    assert trace.num_requests == sum(map(len, gaps))
    assert trace.num_blocks == len(gaps)
    lives = []
    for block in range(len(gaps)):
        seconds = trace.seconds[trace.blocks == block]
        lives.append((seconds[0], seconds[-1]))
    spans = sorted(end - start for start, end in lives)
    assert spans == pytest.approx(sorted(session.requests[-1].seconds for session in sessions))
    for moment in {start for start, _ in lives}:
        assert sum(start < moment < end for start, end in lives) <= alive


@pytest.mark.parametrize("alive", [2, 10**12, 10**30])
def test_more_alive_than_there_are_is_all_of_them(alive: int) -> None:
    requests = [SessionRequest(float(t), [(0, t)], 64, 1, AnswerEnd.ABORT) for t in range(3)]
    sessions = [Session(Path("x"), number, requests) for number in range(2)]
    order = in_order(sessions, alive, 0)
    assert [seconds for seconds, _, _ in order] == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    assert in_order([], alive, 0) == []


def test_a_mark_of_utf_8_in_front_is_no_session(tmp_path: Path) -> None:
    path = write(tmp_path / "sessions.jsonl", session(request(0.0, [1])))
    expected = read_trace(path).input_tokens.tolist()
    path.write_bytes(BOM_UTF8 + path.read_bytes())
    assert read_trace(path).input_tokens.tolist() == expected
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "one.json").write_bytes(path.read_bytes())
    assert read_trace(folder).input_tokens.tolist() == expected


def test_the_shared_sessions() -> None:
    path = shared_data("traces/claude_code_sessions.jsonl.gz")
    assert kv_cache_tester.matches(path)
    trace = read_trace(path, ReadOptions(block_tokens=512))
    trace.check_integrity()
    assert trace.num_requests == 24_669  # 328 of them of sub-agents
    ends = np.bincount(trace.answer_ends, minlength=len(AnswerEnd))
    assert ends.tolist() == [2237, 21_005, 1427, 0, 0]
